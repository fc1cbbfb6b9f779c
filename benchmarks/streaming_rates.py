"""The process of `benchmarks.streaming` that compares rates: steps on memory maps beside steps on data in memory.

    python -m benchmarks.streaming_rates [ROUNDS]

Both in turn; 55,000 examples are in memory. Reads `data/processed` and `params.yaml` of the working folder. Prints one
line of JSON: processor seconds and seconds for each million of examples, of training and of scoring every example, for
both. On a machine that others use as well, processor time says more.
"""

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from gradtrail.core.gradients.passes import compile_passes
from gradtrail.core.nn.models import Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_up_jax
from gradtrail.stages.common.params import load_section
from gradtrail.stages.data import data_files
from gradtrail.stages.gradients.every_example import score_every_example

IN_MEMORY = 55_000
SCORED = 2**17  # examples of a round
STEPS = 1024  # of a round


def timed(action: Callable[[], int]) -> tuple[float, float]:
    """Return processor seconds and seconds per million examples of something that returns their number."""
    processor, wall = time.process_time(), time.perf_counter()
    count = action()
    return tuple(1e6 * spent / count for spent in (time.process_time() - processor, time.perf_counter() - wall))


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    set_up_jax(load_section("environment", EnvironmentConfig), load_section("runtime", RuntimeConfig))
    info = data_files.read_info(Path("data/processed"))
    split = data_files.read_split(Path("data/processed/train"))
    some = split[np.arange(min(IN_MEMORY, len(split)))]
    config = dataclasses.replace(load_section("train", TrainConfig), epochs=1000, privacy=NOT_PRIVATE)
    model = Model(config.model_config(info.image_shape, info.num_classes))
    compiler = Compiler(time.perf_counter)

    def chunks(count: int, *, streamed: bool) -> Iterator[loop.Chunk]:
        sampled = data_files.sample_rows(count) if count > data_files.SAMPLE else None
        program = loop.make_program(config, model, count, jax.local_devices(), streamed=streamed, sampled=sampled)
        engine = program.compile(compiler)
        examples = split if streamed else loop.on_device(some.images, some.labels, program.mesh)
        return loop.train(engine, engine.init(keys_of(config.seeds_of(0))), examples, steps_per_call=100)

    def steps(of: Iterator[loop.Chunk]) -> Callable[[], int]:
        def make() -> int:
            start = chunk = next(of)
            while chunk.step < start.step + STEPS:
                chunk = next(of)
                np.asarray(chunk.records.loss)
            return (chunk.step - start.step) * config.batch_size

        return make

    passes = compile_passes(model, config.loss, compiler=compiler)
    params = jax.device_put(model.init(key=jax.random.key(0)))
    scratch = tempfile.TemporaryDirectory()

    def score() -> int:
        passes.score(params, some.images, some.labels, advance=lambda _: None)
        return len(some)

    def score_from_maps() -> int:
        start = int(np.random.default_rng().integers(0, max(1, len(split) - SCORED)))
        part = split[start : start + SCORED]
        score_every_example(passes, params, part, Path(scratch.name) / "scores.parquet")
        return len(part)

    ways = {
        "train in memory": steps(chunks(len(some), streamed=False)),
        "train from maps": steps(chunks(len(split), streamed=True)),
        "score in memory": score,
        "score from maps": score_from_maps,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            measured = timed(way)
            if number:  # the first round warms up
                found[name].append(measured)
    middle = {name: [statistics.median(each) for each in zip(*times, strict=True)] for name, times in found.items()}
    ratios = {
        what: [
            memory / maps for memory, maps in zip(middle[f"{what} in memory"], middle[f"{what} from maps"], strict=True)
        ]
        for what in ("train", "score")
    }
    print(json.dumps({"per_million": middle, "rate_of_in_memory": ratios, "examples": len(split)}))


if __name__ == "__main__":
    main()
