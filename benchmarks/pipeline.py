"""What a whole run costs, stage by stage: wall time and peak memory, process starts, DVC and MLflow included.

    python -m benchmarks.pipeline [--rounds 3]

Each round forces every stage through `dvc repro`, in the order of the pipeline; the first one warms the file cache and
is not counted. Times of a stage are medians over the rounds. At the end `dvc repro` with nothing to do.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from gradtrail.stages.common.pipeline_file import read_pipeline

NO_OP = "nothing to do"


@dataclass(frozen=True)
class Cost:
    """Wall time of a command, and the largest resident set of any process in it."""

    seconds: float
    peak_mebibytes: float


def measure(*arguments: str) -> Cost:
    """Run `dvc` with these arguments."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"dvc {' '.join(arguments)} failed: {process.stderr and process.stderr.read().decode()}")
    unit = 1024**2 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return Cost(time.perf_counter() - started, usage.ru_maxrss / unit)


def run(rounds: int) -> dict[str, Cost]:
    """Measure every stage `rounds` times after a warm-up; return the medians."""
    stages = list(read_pipeline())
    measured: dict[str, list[Cost]] = {stage: [] for stage in stages}
    for _ in range(rounds + 1):
        for stage in stages:
            measured[stage].append(measure("repro", "--force", "--single-item", stage))
    measured[NO_OP] = [measure("repro") for _ in range(rounds + 1)]
    return {
        name: Cost(
            statistics.median(cost.seconds for cost in costs[1:]),
            statistics.median(cost.peak_mebibytes for cost in costs[1:]),
        )
        for name, costs in measured.items()
    }


def show(costs: dict[str, Cost]) -> None:
    """Print the table."""
    table = Table(title=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("peak memory, MiB", justify="right")
    for name, cost in costs.items():
        table.add_row(name, f"{cost.seconds:.1f}", f"{cost.peak_mebibytes:.0f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    costs = run(arguments.rounds)
    show(costs)
    record("pipeline", {name: vars(cost) for name, cost in costs.items()}, arguments)


if __name__ == "__main__":
    main()
