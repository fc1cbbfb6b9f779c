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
import math
import statistics
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.per_example_peers import Method, ScoreTask
from benchmarks.record import record
from benchmarks.training import machine, networks
from benchmarks.training_tasks import IMAGE_SHAPE, ModelName, image_shape, suffix_of
from benchmarks.turns import Measured, measure, raise_failures

EXAMPLES = 60_000  # in the table
WHOLE = {"mlp": 61_440, "cnn": 2_560}  # examples of a round, whole batches of every size
PART = {"mlp": 6_144, "cnn": 1_024}  # of a round of the slow methods
SLOW: tuple[Method, ...] = ("vmap", "opacus hooks", "torch.func")
NAMES: dict[str, str] = {
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


def tasks(shape: tuple[int, ...]) -> list[ScoreTask]:
    """Return every process, in order."""
    return [
        ScoreTask(
            method=method,
            model=model,
            batch_size=batch_size,
            examples=(PART if method in SLOW else WHOLE)[model],
            image_shape=shape,
        )
        for model, methods in BATCH_SIZES.items()
        for method, batch_sizes in methods.items()
        for batch_size in batch_sizes
    ]


def rows(results: list[Measured]) -> list[dict[str, Any]]:
    """Return each method at its best batch size; NaN if it was not measured."""
    rates: dict[tuple[str, str], list[tuple[float, Measured]]] = {}
    for one in results:
        seconds = statistics.median(seconds for seconds, _ in one.rounds) if one.rounds and not one.note else math.inf
        rates.setdefault((one.task.model, one.task.method), []).append((one.task.examples / seconds, one))
    best = {key: max(tried, key=lambda tried: tried[0]) for key, tried in rates.items()}
    return [
        {
            "model": model,
            "name": NAMES[method],
            "batch_size": one.task.batch_size,
            "examples_per_second": rate,
            "seconds": EXAMPLES / rate if rate else math.nan,
            "times_vmap": rate / (best[model, "vmap"][0] or math.nan),
            "memory_mib": max((grown for _, grown in one.rounds), default=0) / 2**20,
            "note": one.note,
        }
        for (model, method), (rate, one) in best.items()
    ]


def as_table(table_rows: list[dict[str, Any]], shape: tuple[int, ...]) -> Table:
    """Return the table for a terminal."""
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    table = Table(title=about, caption=f"{networks(shape)} Medians, each at the best of several batch sizes, float32.")
    table.add_column("per-example gradient norms")
    for name in ("batch", "examples\n/ second", f"seconds for\n{EXAMPLES:,}", "× vmap\n(grad)", "memory\nMiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for model in BATCH_SIZES:
        table.add_section()
        table.add_row(f"[bold]{model.upper()}")
        for row in (row for row in table_rows if row["model"] == model):
            cells = f"{row['examples_per_second']:,.0f}", f"{row['seconds']:.2f}", f"{row['times_vmap']:.1f}"
            shown = [row["name"], str(row["batch_size"] or "auto"), *cells, f"{row['memory_mib']:,.0f}"]
            table.add_row(*([escape(f"{row['name']}: {row['note']}")] if row["note"] else shown))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=image_shape, default=IMAGE_SHAPE, metavar="32x32x3")
    options = parser.parse_args()
    if not 1 <= options.rounds < 20:
        parser.error("--rounds must be at least 1 and below 20")
    by_model = [[task for task in tasks(options.images) if task.model == model] for model in BATCH_SIZES]
    results = measure("per_example_peers", by_model, options.rounds)
    table_rows = rows(results)
    Console().print(as_table(table_rows, options.images))
    report = {"rows": table_rows, "measured": [*map(dataclasses.asdict, results)]}
    record(f"per_example_gradients{suffix_of(options.images)}", report, options)
    raise_failures(results)


if __name__ == "__main__":
    main()
