"""Where the time of a stage goes: imports, data, compiling, computing, figures, tracking, DVC, as one table.

    python -m benchmarks.phases [--rounds 5] [--stages train,gradients]

Each stage runs twice a round, in turn: forced through `dvc repro`, and by hand with a thread that looks every 5 ms at
what the main thread does. The time since its last look goes to the innermost call that the table knows: an import that
a figure starts is an import. What the stage waits for counts, so compiling beside something else does not. DVC is the
difference of both. Times are medians over the rounds, after one that warms up the caches of files and of compiled
programs. Run `dvc repro` first; it wants the machine to itself.
"""

import argparse
import collections
import contextlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from benchmarks.pipeline import measure
from benchmarks.record import record
from gradtrail.stages.common.pipeline_file import read_pipeline

SECONDS_BETWEEN_LOOKS = 0.005
STARTING, COMPUTING, DVC = "interpreter", "computing", "DVC"
PHASES = {  # parts of a code's path → its phase; the innermost call with one counts
    "imports": ("<frozen importlib",),
    "data": ("stages/artifacts/splits", "stages/artifacts/idx", "stages/artifacts/shards", "stages/common/dataset"),
    "compiling": ("core/xla/compiler",),
    "figures": ("/figures.py", "/time_figures.py", "/matplotlib/"),
    "writing": ("stages/common/files", "stages/common/digests", "stages/artifacts/weights", "/pyarrow/"),
    "tracking": ("gradtrail/tracking/",),
}
COLUMNS = (STARTING, *PHASES, COMPUTING, DVC)


def phase_of(frame: FrameType | None) -> str:
    """Return the phase of the innermost call that has one."""
    while frame:
        path = frame.f_code.co_filename
        for phase, parts in PHASES.items():
            if any(part in path for part in parts):
                return phase
        frame = frame.f_back
    return COMPUTING


@contextlib.contextmanager
def sampled(seconds: dict[str, float]) -> Iterator[None]:
    """Add up the seconds that the main thread spends in each phase."""
    main_thread, ended = threading.get_ident(), threading.Event()

    def look() -> None:
        last = time.perf_counter()
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            phase, now = phase_of(sys._current_frames().get(main_thread)), time.perf_counter()
            seconds[phase] += now - last
            last = now

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def sample(stage: str, output: Path) -> None:
    """Run a stage in this process and write the seconds of its phases."""
    seconds: dict[str, float] = collections.defaultdict(float)
    sys.argv = [f"pipeline/{stage}.py"]
    try:
        with sampled(seconds):
            runpy.run_module(f"pipeline.{stage}", run_name="__main__", alter_sys=True)
    finally:
        output.write_text(json.dumps(seconds))


def phases_of(stage: str) -> dict[str, float]:
    """Return the seconds of a stage's phases, from one run through DVC and one by hand."""
    through_dvc = measure("repro", "--force", "--single-item", stage).seconds
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seconds.json"
        started = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.phases", "--sample", stage, "--output", str(output)]
        env = os.environ | {"PYTHONPATH": "src"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        took = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(f"{stage} failed: {done.stderr}")
        seconds = json.loads(output.read_text())
    return {STARTING: took - sum(seconds.values()), **seconds, DVC: max(0.0, through_dvc - took)}


def show(rows: dict[str, dict[str, float]]) -> None:
    """Print the table."""
    table = Table(title=f"seconds of a stage, {os.cpu_count()} cores; load at the end: {os.getloadavg()[0]:.1f}")
    for name in ("stage", *COLUMNS, "in all"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    total = {column: sum(row[column] for row in rows.values()) for column in COLUMNS}
    for stage, row in (rows | {"all": total}).items():
        table.add_row(stage, *(f"{row[column]:.1f}" for column in COLUMNS), f"{sum(row.values()):.1f}")
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=lambda names: names.split(","), default=list(read_pipeline()))
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        sample(options.sample, options.output)
        return
    rounds = []
    for number in range(options.rounds + 1):
        measured = {stage: phases_of(stage) for stage in options.stages}
        if number:
            rounds.append(measured)
    rows = {
        stage: {column: statistics.median(each[stage].get(column, 0.0) for each in rounds) for column in COLUMNS}
        for stage in options.stages
    }
    show(rows)
    record("phases", rows, argparse.Namespace(rounds=options.rounds))


if __name__ == "__main__":
    main()
