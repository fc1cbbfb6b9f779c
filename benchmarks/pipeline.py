"""Where people wait: the stages, by what their time goes to, with their memory, and the commands of README.

    python -m benchmarks.pipeline [--rounds 5] [--stages train,gradients] [--commands] [--install]

Each stage runs twice a round, in turn: forced through `dvc repro`, and by hand with a thread that looks every 5 ms at
what the main thread does. The time since its last look goes to the innermost call that the table knows: an import that
a figure starts is an import. What the stage waits for counts, so compiling beside something else does not. DVC is the
difference of both. Times are medians over the rounds, after one that warms up the caches of files and of compiled
programs. The commands, with `--commands` alone, are `dvc repro --force`, `dvc repro` and `make repro` with nothing to
do, and with `--install` two `make env` in a clone: without any cache, and with the one that this left. Run `make repro`
first; it wants the machine to itself.
"""

import argparse
import collections
import contextlib
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from gradtrail.stages.common.pipeline_file import read_pipeline

SECONDS_BETWEEN_LOOKS = 0.005
STARTING, COMPUTING, DVC, MEMORY = "interpreter", "computing", "DVC", "peak MiB"
PHASES = {  # parts of a code's path → its phase; the innermost call with one counts
    "imports": ("<frozen importlib",),
    "data": ("stages/data/data_files",),
    "compiling": ("core/xla/compiler",),
    "figures": ("/figures.py", "/matplotlib/"),
    "writing": ("stages/common/files", "stages/model/weights", "/pyarrow/"),
    "tracking": ("gradtrail/tracking/",),
}
COLUMNS = (STARTING, *PHASES, COMPUTING, DVC)


@dataclass(frozen=True)
class Cost:
    """Wall time of a command, and the largest resident set of any process in it."""

    seconds: float
    peak_mebibytes: float


def measure(*arguments: str) -> Cost:
    """Run `dvc` with these arguments."""
    return measure_command(sys.executable, "-m", "dvc", *arguments)


def measure_command(*command: str, folder: Path = Path(), env: Mapping[str, str] | None = None) -> Cost:
    """Run a command in a folder, with some more of environment."""
    started = time.perf_counter()
    streams: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=os.environ | dict(env or {}), **streams)
    said = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed: {said.decode()}")
    unit = 1024**2 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return Cost(time.perf_counter() - started, usage.ru_maxrss / unit)


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
    through_dvc = measure("repro", "--force", "--single-item", stage)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seconds.json"
        command = (sys.executable, "-m", "benchmarks.pipeline", "--sample", stage, "--output", str(output))
        took = measure_command(*command, env={"PYTHONPATH": "src"}).seconds
        seconds = json.loads(output.read_text())
    rest = {STARTING: took - sum(seconds.values()), DVC: max(0.0, through_dvc.seconds - took)}
    return {**seconds, **rest, MEMORY: through_dvc.peak_mebibytes}


def stages(names: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians of each stage's phases, after a round that is not counted."""
    measured = [{name: phases_of(name) for name in names} for _ in range(rounds + 1)][1:]
    return {
        name: {key: statistics.median(each[name].get(key, 0.0) for each in measured) for key in (*COLUMNS, MEMORY)}
        for name in names
    }


def commands(rounds: int) -> dict[str, float]:
    """Return the median seconds of the commands, in turn, after one of each that is not counted."""
    each: dict[str, tuple[str, ...]] = {
        "dvc repro --force": (sys.executable, "-m", "dvc", "repro", "--force"),
        "dvc repro, nothing to do": (sys.executable, "-m", "dvc", "repro"),
        "make repro after it, which looks for runs to make": ("make", "repro"),
        "make repro, nothing to do": ("make", "repro"),
    }
    took = [{name: measure_command(*command).seconds for name, command in each.items()} for _ in range(rounds + 1)]
    return {name: statistics.median(one[name] for one in took[1:]) for name in each}


def installing() -> dict[str, float]:
    """Return the seconds of `make env` in a clone of the last commit, without a cache and with one."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", ".", str(clone)], check=True)
        caches = {name: str(Path(folder) / name) for name in ("UV_CACHE_DIR", "PIP_CACHE_DIR")}
        took = {}
        for name in ("make env, no cache", "make env, warm cache"):
            took[name] = measure_command("make", "env", folder=clone, env=caches).seconds
            shutil.rmtree(clone / ".venv")
    return took


def show(rows: dict[str, dict[str, float]]) -> None:
    """Print the table."""
    table = Table(title=f"seconds of a stage, {os.cpu_count()} cores; load at the end: {os.getloadavg()[0]:.1f}")
    for name in ("stage", *COLUMNS, "in all", MEMORY):
        table.add_column(name, justify="left" if name == "stage" else "right")
    total = {column: sum(row[column] for row in rows.values()) for column in COLUMNS}
    total[MEMORY] = max(row[MEMORY] for row in rows.values())
    for stage, row in (rows | {"all": total}).items():
        parts = [row[column] for column in COLUMNS]
        table.add_row(stage, *(f"{part:.1f}" for part in (*parts, sum(parts))), f"{row[MEMORY]:.0f}")
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=lambda names: names.split(","), default=list(read_pipeline()))
    parser.add_argument("--commands", action="store_true", help="measure no stage")
    parser.add_argument("--install", action="store_true", help="also measure `make env`, which downloads all packages")
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        sample(options.sample, options.output)
        return
    if not options.commands:
        rows = stages(options.stages, options.rounds)
        show(rows)
        record("pipeline", rows, argparse.Namespace(rounds=options.rounds))
    seconds = commands(options.rounds) | (installing() if options.install else {})
    for name, took in seconds.items():
        print(f"{name}: {took:.1f} s")
    record("commands", seconds, argparse.Namespace(rounds=options.rounds))


if __name__ == "__main__":
    main()
