"""The section `runtime` of `params.yaml`: what cannot change an out, and so is no DVC param and part of no state."""

from dataclasses import dataclass

from gradtrail.core.common.validation import check


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How a stage works, as opposed to what it makes.

    Attributes:
        mirrors: addresses of folders that hold the four MNIST files as `.gz`, tried in order.
        openml: whether to ask OpenML when no mirror delivers.
        download_timeout_seconds: longest that one file may take from one mirror; a silent one is left much sooner.
        steps_per_call: optimizer steps between two signs of progress.
        checkpoint_seconds: between two checkpoints of a training, for a killed one to go on from.
        compile_cache: whether to keep compiled functions on disk, for the next run.
        trace: whether to record some training steps with JAX's profiler, as an artifact.
        tracking: whether to log to MLflow.
        tracking_seconds: that a stage waits, in all, for a tracking server; what is missing then `gradtrail sync`
            brings.
        system_metrics: whether to log the use of processor and memory.
        copy_outs: whether a row in MLflow holds weights and parquet tables themselves, rather than their digests.
        log_kept_epochs: whether the weights of the kept epochs are models in MLflow too, beside the final and the best.
        debug_nans: whether to stop at the first NaN, in the operation that made it.
        disable_jit: whether to run every operation by itself. Under both no outs are written, their bits being others.
        gpu_preallocate: whether JAX takes most of a GPU's memory at once.
        gpu_deterministic: whether a GPU may use only operations that give the same bits every time.
    """

    mirrors: tuple[str, ...]
    openml: bool
    download_timeout_seconds: float
    steps_per_call: int
    checkpoint_seconds: float
    compile_cache: bool
    trace: bool
    tracking: bool
    tracking_seconds: float
    system_metrics: bool
    copy_outs: bool
    log_kept_epochs: bool
    debug_nans: bool
    disable_jit: bool
    gpu_preallocate: bool
    gpu_deterministic: bool

    def __post_init__(self) -> None:
        check("download_timeout_seconds", self.download_timeout_seconds, above=0)
        check("steps_per_call", self.steps_per_call, at_least=1)
        check("checkpoint_seconds", self.checkpoint_seconds, above=0)
        check("tracking_seconds", self.tracking_seconds, above=0)
