"""The process of `benchmarks.streaming` that scores every example of `data/processed`, and 60,000 in memory beside.

    python -m benchmarks.streaming_norms OUT.parquet

Before and after the pass over all examples come passes over 60,000 whose arrays are in memory and whose scores stay
there. Prints one line of JSON with both rates, in examples per second, and the peak memory.
"""

import json
import resource
import statistics
import sys
import time
from pathlib import Path

import jax

from gradtrail.core.common.sharding import make_mesh
from gradtrail.core.gradients.passes import compile_passes
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.artifacts.shards import ShardedSplit
from gradtrail.stages.artifacts.weights import read_weights
from gradtrail.stages.common import dataset
from gradtrail.stages.common.environment import EnvironmentConfig, set_up_jax
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.gradients.every_example import score_every_example

IN_MEMORY = 60_000
ROUNDS = 3


def main() -> None:
    """Measure and print."""
    set_up_jax(load_section("environment", EnvironmentConfig), load_section("runtime", RuntimeConfig))
    info = dataset.read_info(Path("data/processed"))
    split = ShardedSplit(Path("data/processed/train.npz"), info)
    model, params, about = read_weights(Path("models/final.safetensors"))
    compiler, mesh = Compiler(time.perf_counter), make_mesh(jax.local_devices()[:1])
    passes = compile_passes(model, about.label_smoothing, 1, curvature=False, compiler=compiler, mesh=mesh)
    placed, some = passes.place(params), split.read_split(0, min(IN_MEMORY, len(split)))

    def rate_in_memory() -> float:
        started = time.perf_counter()
        passes.score(placed, some.images, some.labels, advance=lambda _: None)
        return len(some) / (time.perf_counter() - started)

    rate_in_memory()
    around = [rate_in_memory() for _ in range(ROUNDS)]
    started = time.perf_counter()
    metrics = score_every_example(passes, params, split, Path(sys.argv[1]))
    rate = len(split) / (time.perf_counter() - started)
    around += [rate_in_memory() for _ in range(ROUNDS)]
    found = {
        "examples": len(split),
        "examples_per_second": rate,
        "in_memory_examples_per_second": around,
        "ratio": rate / statistics.mean(around),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "metrics": metrics,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
