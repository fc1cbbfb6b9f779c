"""One training in raw pytrees, Flax Linen, Flax NNX and Equinox: lines, time of a step, time to compile.

    python -m benchmarks.dialects [--processes 10] [--rounds 30]

Each program of `benchmarks/dialect_programs` trains the MLP 784-256-128-10 with Optax' AdamW, from the same weights to
the same losses. A step is timed as Python calls it, where the dialects differ, and in the compiled loop over an epoch,
where XLA sees much the same program. A process runs bursts of all programs in random order; the ratio to raw pytrees is
the median of its rounds, the interval that of the mean over the processes. Compiling is the first call of each function
in a fresh process, without a cache of compiled programs.

It takes a few minutes and wants the machine for itself. `JAX_PLATFORMS=cuda` runs it on a GPU.
"""

import argparse
import ast
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks.dialect_peers import DIALECTS, Task
from benchmarks.record import record
from benchmarks.training import machine
from benchmarks.turns import measure, raise_failures

PROGRAMS = Path(__file__).with_name("dialect_programs")
LEVEL = 0.99
NAMES = {"raw": "raw pytrees", "linen": "Flax Linen", "nnx": "Flax NNX", "equinox": "Equinox"}
WAYS = {"step": "steps called from Python", "epoch": "an epoch as a compiled loop"}


def count_lines(source: str) -> int:
    """Count the lines of a program without its docstring, comments and blank lines."""
    docstring = ast.parse(source).body[0]
    lines = map(str.strip, source.splitlines()[docstring.end_lineno :])
    return sum(bool(line) and not line.startswith("#") for line in lines)


def ratio_to_raw(reports: Sequence[dict[str, Any]], dialect: str, way: str) -> dict[str, float]:
    """Return the ratio of the time of a step to that in raw pytrees, with its interval."""
    medians = [
        statistics.median(math.log(seconds[dialect][way] / seconds["raw"][way]) for seconds in report["step_seconds"])
        for report in reports
    ]
    center, half = statistics.fmean(medians), float(stats.t.ppf((1 + LEVEL) / 2, len(medians) - 1)) * stats.sem(medians)
    return {"ratio": math.exp(center), "low": math.exp(center - half), "high": math.exp(center + half)}


def summarize(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each dialect."""
    rows = []
    for dialect in DIALECTS:
        row: dict[str, Any] = {
            "dialect": dialect,
            "lines": count_lines((PROGRAMS / f"{dialect}.py").read_text(encoding="utf-8")),
        }
        for way in WAYS:
            rounds = [seconds[dialect][way] for report in reports for seconds in report["step_seconds"]]
            compiled = [report["compile_seconds"][dialect][way] for report in reports]
            row[way] = {
                "step_seconds": statistics.median(rounds),
                "compile_seconds": statistics.median(compiled),
                **ratio_to_raw(reports, dialect, way),
            }
        rows.append(row)
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table for a terminal."""
    title = ", ".join(f"{name} {value}" for name, value in machine().items())
    table = Table(title=title, caption=f"Ratios to raw pytrees with {LEVEL:.0%} intervals; medians of the other times.")
    table.add_column("training")
    for name in ("lines", "ms\n/ step", "× raw pytrees", "compile\ns"):
        table.add_column(name, justify="right", no_wrap=True)
    for way, name in WAYS.items():
        table.add_section()
        table.add_row(f"[bold]{name}")
        for row in rows:
            times = row[way]
            ratio = f"{times['ratio']:.2f} ({times['low']:.2f} to {times['high']:.2f})"
            cells = f"{1e3 * times['step_seconds']:.2f}", ratio, f"{times['compile_seconds']:.2f}"
            table.add_row(NAMES[row["dialect"]], str(row["lines"]), *cells)
    return table


def main() -> None:
    """Measure, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=30, help="per process")
    parser.add_argument("--steps", type=int, default=50, help="per burst, and per epoch")
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    if options.processes < 3 or min(options.rounds, options.steps, options.batch_size) < 1:
        parser.error("--processes must be at least 3, --rounds, --steps and --batch-size at least 1")
    tasks = [Task(seed=seed, batch_size=options.batch_size, steps=options.steps) for seed in range(options.processes)]
    results = measure("dialect_peers", [[task] for task in tasks], options.rounds)
    raise_failures(results)
    rows = summarize([{"compile_seconds": one.ready, "step_seconds": one.rounds} for one in results])
    Console().print(as_table(rows))
    record("dialects", {"rows": rows}, options)


if __name__ == "__main__":
    main()
