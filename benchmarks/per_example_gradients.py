"""What per-example gradient norms cost: this project, `vmap(grad)`, Opacus and torch.func, in one table.

    python -m benchmarks.per_example_gradients [--rounds 5] [--images 32x32x3]

All find the norm of the gradient of every example, of the same networks in float32 on the same images drawn from a
fixed seed, of 28 × 28 pixels unless `--images` says otherwise; this project finds the norms layer by layer, EL2N, loss,
margin and entropy besides, from uint8 images on the host. For comparison: the mean gradient of batches, and an epoch of
training, neither of which gives norms. Each row is tried at several batch sizes, each in a process of its own with a
round of warm-up, and shown at the best. All of a network are measured in turn (`benchmarks.turns`). Times are medians.
Slow methods process a part of the data, scaled.

"Memory" is what the process grew by at its largest while it worked, allocator and compiler included.

It takes a quarter of an hour on two cores and wants them for itself. PyTorch and Opacus are optional:
`pip install torch opacus`.
"""

import argparse
import dataclasses
import importlib.util
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.per_example_peers import Method, ScoreTask
from benchmarks.record import record
from benchmarks.training import machine, networks
from benchmarks.training_tasks import IMAGE_SHAPE, ModelName, image_shape, suffix_of
from benchmarks.turns import Worker
from gradtrail.support.progress import progress_bar

EXAMPLES = 60_000  # in the table
WHOLE = {"mlp": 61_440, "cnn": 2_560}  # examples of a round, whole batches of every size
PART = {"mlp": 6_144, "cnn": 1_024}  # of a round of the slow methods
SLOW: tuple[Method, ...] = ("vmap", "opacus hooks", "torch.func")
NAMES: dict[Method, str] = {
    "mean": "mean gradient",
    "training": "training epoch",
    "vmap": "vmap(grad)",
    "ours": "ours",
    "opacus hooks": "Opacus, hooks",
    "opacus ghost": "Opacus, ghost clipping",
    "torch.func": "torch.func vmap",
}
BATCH_SIZES: dict[ModelName, dict[Method, tuple[int, ...]]] = {
    "mlp": {
        "mean": (128, 512, 2048),
        "training": (128,),
        "vmap": (8, 32, 128, 512),
        "ours": (0,),
        "opacus hooks": (32, 128, 512),
        "opacus ghost": (512, 2048, 6144),
        "torch.func": (32, 128, 512),
    },
    "cnn": {
        "mean": (16, 32, 128),
        "training": (128,),
        "vmap": (4, 8, 16, 32),
        "ours": (0,),
        "opacus hooks": (16, 64),
        "opacus ghost": (16, 64, 256),
        "torch.func": (16, 64),
    },
}
NO_OPACUS = "not installed: pip install torch opacus"


@dataclass(kw_only=True)
class Measured:
    """What the processes of one method and batch size reported.

    Attributes:
        seconds: of every timed round.
        note: why there are none.
    """

    task: ScoreTask
    seconds: list[float] = field(default_factory=list)
    grown_bytes: list[int] = field(default_factory=list)
    note: str | None = None

    @property
    def examples_per_second(self) -> float:
        """Median; 0 where nothing was measured."""
        return self.task.examples / statistics.median(self.seconds) if self.seconds and not self.note else 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: a method at its best batch size.

    Attributes:
        times_vmap: how many times as fast as `vmap(grad)`.
        seconds: for `EXAMPLES`.
    """

    model: ModelName
    name: str
    batch_size: int
    examples_per_second: float
    seconds: float
    times_vmap: float
    memory_mib: float
    note: str | None


def tasks(rounds: int, shape: tuple[int, ...]) -> list[ScoreTask]:
    """Return every process, in order."""
    return [
        ScoreTask(
            method=method,
            model=model,
            batch_size=batch_size,
            examples=(PART if method in SLOW else WHOLE)[model],
            rounds=rounds,
            image_shape=shape,
        )
        for model, methods in BATCH_SIZES.items()
        for method, batch_sizes in methods.items()
        for batch_size in batch_sizes
    ]


def run(rounds: int, shape: tuple[int, ...] = IMAGE_SHAPE) -> list[Measured]:
    """Measure all methods of a network in turn, so many times."""
    found = [Measured(task=task) for task in tasks(rounds, shape)]
    missing = not all(importlib.util.find_spec(name) for name in ("torch", "opacus"))
    for measured in found:
        if missing and measured.task.method in ("opacus hooks", "opacus ghost", "torch.func"):
            measured.note = NO_OPACUS
    with progress_bar("per-example gradients", (rounds + 1) * len(found), unit="steps") as bar:
        for model in BATCH_SIZES:
            _measure([each for each in found if each.task.model == model and not each.note], rounds, bar)
    return found


def _measure(found: list[Measured], rounds: int, bar: Any) -> None:
    workers: list[Worker] = []
    try:
        for measured in found:
            bar.advance(message=f"{measured.task.method}, {measured.task.model}, {measured.task.batch_size}")
            workers.append(Worker("per_example_peers", measured.task))
        for _ in range(rounds):
            for measured, worker in zip(found, workers, strict=True):
                if (reported := worker.ask()) is not None:
                    measured.seconds.append(reported[0])
                    measured.grown_bytes.append(reported[1])
                measured.note = worker.note
                bar.advance()
    finally:
        for worker in workers:
            worker.stop()


def rows(found: list[Measured]) -> list[Row]:
    """Return each method at its best batch size."""
    table = []
    for model, methods in BATCH_SIZES.items():
        mine = [measured for measured in found if measured.task.model == model]
        best = {
            method: max(
                (measured for measured in mine if measured.task.method == method),
                key=lambda measured: measured.examples_per_second,
            )
            for method in methods
        }
        definition = best["vmap"].examples_per_second
        for method, measured in best.items():
            rate = measured.examples_per_second
            table.append(
                Row(
                    model=model,
                    name=NAMES[method],
                    batch_size=measured.task.batch_size,
                    examples_per_second=rate,
                    seconds=EXAMPLES / rate if rate else math.nan,
                    times_vmap=rate / definition if definition else math.nan,
                    memory_mib=max(measured.grown_bytes, default=0) / 2**20,
                    note=measured.note,
                )
            )
    return table


def as_table(table_rows: list[Row], shape: tuple[int, ...]) -> Table:
    """Return the table for a terminal."""
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    table = Table(title=about, caption=f"{networks(shape)} Medians, each at the best of several batch sizes, float32.")
    table.add_column("per-example gradient norms")
    for name in ("batch", "examples\n/ second", f"seconds for\n{EXAMPLES:,}", "× vmap\n(grad)", "memory\nMiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for model in BATCH_SIZES:
        table.add_section()
        table.add_row(f"[bold]{model.upper()}")
        for row in (row for row in table_rows if row.model == model):
            if row.note:
                table.add_row(escape(f"{row.name}: {row.note}"))
                continue
            cells = f"{row.examples_per_second:,.0f}", f"{row.seconds:.2f}", f"{row.times_vmap:.1f}"
            table.add_row(row.name, str(row.batch_size or "auto"), *cells, f"{row.memory_mib:,.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=image_shape, default=IMAGE_SHAPE, metavar="32x32x3")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    found = run(arguments.rounds, arguments.images)
    table_rows = rows(found)
    Console().print(as_table(table_rows, arguments.images))
    report = {"rows": [*map(dataclasses.asdict, table_rows)], "measured": [*map(dataclasses.asdict, found)]}
    record(f"per_example_gradients{suffix_of(arguments.images)}", report, arguments)
    failures = [f"{measured.task}: {measured.note}" for measured in found if measured.note not in (None, NO_OPACUS)]
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
