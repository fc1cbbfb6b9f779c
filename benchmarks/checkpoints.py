"""What checkpoints cost a training: the same one with and without, in turn.

    python -m benchmarks.checkpoints [--rounds 5] [--epochs 20]

Trains on `data/processed` by `params.yaml`. Checkpoints come much oftener than by default, so that what one costs
stands out from the noise; the share is that of the cadence in `params.yaml`. The first pair warms up.
"""

import argparse
import dataclasses
import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common import dataset
from gradtrail.stages.train import loop as training_runs
from gradtrail.stages.train.checkpoints import Checkpoints
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.run import TrackedRun
from gradtrail.tracking.mlflow.training_log import TrainingLog

OFTEN_SECONDS = 2.0
NEVER = float("inf")


class CountedFolder(Checkpoints):
    """Checkpoints that are counted as they are written."""

    written = 0

    def _start(self, *args: Any) -> None:
        super()._start(*args)
        self.written += 1


def run(rounds: int, epochs: int) -> dict[str, float]:
    """Return the seconds of a training without checkpoints, of one checkpoint, and its share at the default cadence."""
    stage = Identity("train")
    config = dataclasses.replace(stage.params(TrainConfig), epochs=epochs, keep_epochs=(), privacy=NOT_PRIVATE)
    runtime = stage.runtime
    info = dataset.read_info(Path("data/processed"))
    train, validation = (dataset.read_split(Path(f"data/processed/{name}.npz"), info) for name in dataset.SPLITS[:2])
    model = Model(config.model_config(info.image_shape, info.num_classes))
    compiler = Compiler(time.perf_counter)
    engine = loop.make_program(config, model, len(train), jax.local_devices()).compile(compiler)
    predict = inference.compile_predict(model, inference.VALIDATION_BATCH_SIZE, compiler=compiler)
    validate = functools.partial(inference.validate, predict, images=validation.images, labels=validation.labels)

    def seconds(every_seconds: float) -> tuple[float, int]:
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = CountedFolder(Path(folder) / "resume", every_seconds, time.monotonic)
            listener = TrainingLog(TrackedRun(stage, None), engine, runtime, is_live=True)
            member = training_runs.Member(seeds=config.seeds_of(config.seed), checkpoints=checkpoints)
            options = {"member": member, "steps_per_call": runtime.steps_per_call}
            started = time.perf_counter()
            training_runs.run(engine, validate, train, config, listener=listener, **options)
            checkpoints.remove()
            return time.perf_counter() - started, checkpoints.written

    without, costs = [], []
    for number in range(rounds + 1):
        alone, (beside, count) = seconds(NEVER)[0], seconds(OFTEN_SECONDS)
        if number:
            without.append(alone)
            costs.append((beside - alone) / count)
    cost = statistics.median(costs)
    return {
        "training_seconds": statistics.median(without),
        "checkpoint_seconds": cost,
        "share_at_default": cost / runtime.checkpoint_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    found = run(options.rounds, options.epochs)
    table = Table("training, s", "one checkpoint, s", "share at the default cadence")
    table.add_row(*(f"{found[key]:.2f}" for key in list(found)[:2]), f"{found['share_at_default']:.1%}")
    Console().print(table)
    record("checkpoints", found, options)


if __name__ == "__main__":
    main()
