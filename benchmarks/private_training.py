"""What a private step costs: beside this project's ordinary step, `vmap(grad)` and Opacus.

    python -m benchmarks.private_training [--rounds 9] [--opacus-python ENVIRONMENT/bin/python]

All train the same networks with Adam in float32 on the same 55,000 images drawn from a fixed seed, clip the gradient of
each example to norm 1 and add noise of multiplier 1. Ours and Opacus' batches are Poisson-sampled, and drawing them is
timed; `vmap(grad)` and our ordinary step have shuffled batches of a fixed size. Ours keeps the records of every step.

The network of Opacus' MNIST example has strides, which this project's networks do not have: there, our rows are a
network without strides and of as many multiplications in a forward pass (channels 8 and 24, 32 hidden units).

Each row is a process of its own, and all make their rounds in turn (`benchmarks.turns`). A round is an epoch, or as
many steps as take `--seconds`. Times are medians over the rounds after a warm-up; ratios are medians over the rounds of
the ratio within a round.

It takes a quarter of an hour on two cores and wants them for itself: the threads of PyTorch wait for the slowest.
PyTorch and Opacus are optional. They may have an environment of their own:

    python3 -m venv ~/opacus-env && ~/opacus-env/bin/pip install torch opacus
    python -m benchmarks.private_training --opacus-python ~/opacus-env/bin/python
"""

import argparse
import dataclasses
import math
import statistics
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.private_peers import Method, Network, PrivateTask
from benchmarks.record import record
from benchmarks.training import machine, networks
from benchmarks.turns import Measured, measure, raise_failures

SETTINGS: tuple[tuple[Network, int], ...] = (("mlp", 512), ("mlp", 2048), ("cnn", 128), ("strided", 128))
TITLES: dict[Network, str] = {"mlp": "MLP", "cnn": "CNN", "strided": "strided CNN of Opacus' example"}
NAMES: dict[Method, str] = {
    "ordinary": "ours, ordinary",
    "private": "ours, private",
    "vmap": "JAX, vmap(grad), private",
    "ghost": "Opacus, ghost clipping",
    "hooks": "Opacus, hooks",
}


def ratio(first: Measured, second: Measured) -> float:
    """Return the median of the ratio of two times within a round; NaN if one was not measured."""
    ratios = [seconds / others for seconds, others in zip(first.rounds, second.rounds, strict=False)]
    return statistics.median(ratios) if ratios else math.nan


def rows_of(results: list[Measured]) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    by_task = {(one.task.network, one.task.batch_size, one.task.method): one for one in results}
    return [
        {
            "network": network,
            "batch_size": batch_size,
            "method": method,
            "milliseconds_per_step": 1e3 * measured.median,
            "examples_per_second": batch_size / measured.median,
            "ratio_to_ordinary": ratio(measured, by_task[network, batch_size, "ordinary"]),
            "ratio_to_private": ratio(measured, by_task[network, batch_size, "private"]),
            "note": measured.note,
        }
        for (network, batch_size, method), measured in by_task.items()
    ]


def as_table(rows: list[dict[str, Any]], versions: dict[str, str]) -> Table:
    """Return the table for a terminal."""
    about = ", ".join(f"{name} {text}" for name, text in (machine() | versions).items())
    table = Table(title=about, caption=f"{networks()} Medians, float32.")
    table.add_column("a step")
    for name in ("ms", "examples\n/ second", "× our\nordinary", "× our\nprivate"):
        table.add_column(name, justify="right", no_wrap=True)
    setting = None
    for row in rows:
        if setting != (setting := (row["network"], row["batch_size"])):
            table.add_section()
            table.add_row(f"[bold]{TITLES[row['network']]}, batch {row['batch_size']}")
        numbers = f"{row['milliseconds_per_step']:.2f}", f"{row['examples_per_second']:,.0f}"
        ratios = f"{row['ratio_to_ordinary']:.2f}", f"{row['ratio_to_private']:.2f}"
        name = NAMES[row["method"]]
        table.add_row(*([escape(f"{name}: {row['note']}")] if row["note"] else [name, *numbers, *ratios]))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument(
        "--opacus-python", default="", help="interpreter of the environment that has PyTorch and Opacus"
    )
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds must be at least 1, --seconds more than 0")
    groups = [
        [
            PrivateTask(method=method, network=network, batch_size=batch_size, seconds=options.seconds)
            for method in NAMES
        ]
        for network, batch_size in SETTINGS
    ]
    results = measure("private_peers", groups, options.rounds, options.opacus_python)
    rows, versions = rows_of(results), [one.ready[0] for one in results if one.ready]
    Console().print(as_table(rows, {name: text for own in versions for name, text in own.items()}))
    options.opacus_python = bool(options.opacus_python)  # a path of this machine is no result
    record("private_training", {"rows": rows, "measured": [*map(dataclasses.asdict, results)]}, options)
    raise_failures(results)


if __name__ == "__main__":
    main()
