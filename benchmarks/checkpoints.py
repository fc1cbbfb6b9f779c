"""What checkpoints cost a training: the same one with and without, in turn.

    python -m benchmarks.checkpoints [--rounds 5] [--epochs 20]

Trains on `data/processed` by `params.yaml`. Checkpoints come much oftener than by default, so that what one costs
stands out from the noise; the share is that of the cadence in `params.yaml`. The first pair warms up.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common.stage import Stage
from gradtrail.stages.train.checkpoints import Checkpoints
from gradtrail.stages.train.training import NullListener, Training

OFTEN_SECONDS = 2.0
NEVER = float("inf")


class CountedCheckpoints(Checkpoints):
    """Checkpoints that are counted as they are written."""

    written = 0

    def _start(self, *args: Any) -> None:
        super()._start(*args)
        self.written += 1


def run(rounds: int, epochs: int) -> dict[str, float]:
    """Return the seconds of a training without checkpoints, of one checkpoint, and its share at the default cadence."""
    training = Training.load(Stage("train"))
    training.config = dataclasses.replace(training.config, epochs=epochs, keep_epochs=(), privacy=NOT_PRIVATE)
    training.compile(Compiler(time.perf_counter))

    def seconds(every_seconds: float) -> tuple[float, int]:
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = CountedCheckpoints(Path(folder) / "resume", every_seconds)
            started = time.perf_counter()
            training.train_network(training.config.seeds_of(0), checkpoints, NullListener())
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
        "share_at_default": cost / training.runtime.checkpoint_seconds,
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
