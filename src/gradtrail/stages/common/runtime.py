"""The section `runtime` of `params.yaml`: settings that cannot change an output: no DVC param, in no state key."""

from typing import Annotated

from gradtrail.core.config import Bounds, Count, Positive, config

Seconds = Annotated[float, Bounds(above=0, at_most=1_000_000)]  # the system counts milliseconds in int32


@config
class RuntimeConfig:
    """Settings of how a stage runs, as opposed to what it computes."""

    # Base URLs that serve the four files of the data set as `.gz`, tried in order; None for the data set's own
    mirrors: tuple[str, ...] | None
    openml: bool  # True to use OpenML, if it has the data set and no mirror delivers
    download_timeout_seconds: Seconds  # for one file from one mirror; a mirror that sends nothing is given up sooner
    steps_per_call: Count  # optimizer steps between two updates of the progress bar
    checkpoint_seconds: Positive  # time between two checkpoints of a training, from which it resumes after a kill
    join_seconds: Seconds  # longest wait of one of several processes for the others at the start
    compile_cache: bool  # True to keep compiled functions on disk, for the next run
    trace: bool  # True to record half a second of the stage's work with JAX's profiler, as an artifact
    tracking: bool  # True to log to MLflow
    tracking_seconds: Seconds  # total time a stage waits for a tracking server; `gradtrail sync` uploads the rest
    system_metrics: bool  # True to log the usage of processor and memory, for stages longer than a minute
    copy_outs: bool  # True to log weights and parquet tables as artifacts, in addition to their digests
    debug_nans: bool  # True to stop at the first NaN, in the operation that produced it; no outputs are written
    disable_jit: bool  # True to run every operation by itself; no outputs are written, since their bits would differ
    gpu_preallocate: bool  # True if JAX allocates most of a GPU's memory at start
