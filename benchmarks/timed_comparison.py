"""Whether timed comparisons can be believed: a training against itself, and against itself with work planted.

    python -m benchmarks.timed_comparison [--tries 20] [--seconds 300]

Each try is what `gradtrail gate --timed` does, without the checkout: processes of the working folder's training, as
`params.yaml` configures it, on images of MNIST's shape. In the first half B is A. In the second half B does more: a
burst of it is repeated in part, so that it takes 5 % longer. Counted are intervals that are no wider than 3 % and hold
1, and slowdowns that are found, the whole interval above 1. A try takes one to two minutes, on a busy machine five.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from benchmarks.training import machine
from gradtrail.experiments.timed.ratio import WIDEST, Ratio, TimedProcess, compare_times
from gradtrail.experiments.timed.revisions import Revision, running
from gradtrail.support.tables import table

SLOWDOWN = 0.05


def slowed(process: TimedProcess) -> TimedProcess:
    """Return a process that does its work and a share of it again; the share is rounded at random, exact on average."""
    rng = np.random.default_rng()

    def run(steps: int) -> float:
        more = SLOWDOWN * steps
        return process.run(steps + int(more) + (rng.random() < more % 1))

    return TimedProcess(run, process.steps_per_epoch)


def one(*, is_slowed: bool, seconds: float, cache: Path) -> Ratio:
    """Make one comparison."""
    revisions = {side: Revision(side, Path()) for side in "AB"}

    @contextlib.contextmanager
    def start() -> Iterator[Mapping[str, TimedProcess]]:
        with running(revisions, cache) as processes:
            yield {"A": processes["A"], "B": slowed(processes["B"])} if is_slowed else processes

    return compare_times(start, budget=seconds, clock=time.monotonic, rng=np.random.default_rng())


def as_table(results: Mapping[str, list[Ratio]]) -> Table:
    """Return the table for a terminal."""
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    rows = []
    for name, ratios in results.items():
        good = sum(ratio.low <= 1 <= ratio.high and ratio.high - ratio.low <= WIDEST for ratio in ratios)
        rows.append(
            {
                "B": name,
                "tries": str(len(ratios)),
                "hold 1, ≤ 3 % wide": str(good),
                "found slower": str(sum(ratio.low > 1 for ratio in ratios)),
                "width, %": f"{100 * np.median([ratio.high - ratio.low for ratio in ratios]):.2f}",
                "ratio": f"{np.median([ratio.ratio for ratio in ratios]):.4f}",
                "seconds": f"{np.median([ratio.seconds for ratio in ratios]):.0f}",
            }
        )
    return table(f"{about}, load {os.getloadavg()[0]:.1f}", rows, right=[*rows[0]][1:])


def main() -> None:
    """Make the tries, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args()
    results: dict[str, list[Ratio]] = {"the same": [], f"{SLOWDOWN:.0%} more work": []}
    console = Console()
    with tempfile.TemporaryDirectory() as cache:
        for number in range(arguments.tries):
            for name, ratios in results.items():
                ratios.append(one(is_slowed=name != "the same", seconds=arguments.seconds, cache=Path(cache)))
                console.print(f"{number + 1}, {name}: {ratios[-1].describe()}", soft_wrap=True, highlight=False)
    console.print(as_table(results))
    record(
        "timed_comparison", {name: [asdict(ratio) for ratio in ratios] for name, ratios in results.items()}, arguments
    )


if __name__ == "__main__":
    main()
