"""What MLflow costs: seconds and bytes of each stage's run, and seconds of a sync over many states.

    python -m benchmarks.tracking [--rounds 5] [--states 50] [--stages fetch,train]

Works in a clone of this repository in a temporary folder, on the results that DVC's cache has (run `dvc repro` first).
Every stage runs by hand, with tracking and without in turn, into a store that has no run; the first pair warms up. Of
`profile` only the run with tracking takes times, since they are logged and no out. The load of the machine is told:
other work on it lengthens everything, and the shares too where no core is free for the shipper. With `--states 0` there
is no sync; else as many commits are made as there are states to be, each with another seed of the training in its
`dvc.lock` and the same outs, and a store without runs is brought up to date.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from benchmarks.record import record
from gradtrail.stages.common.dvc_cache import cache_folder
from gradtrail.stages.common.pipeline_file import read_pipeline


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Cost of one stage's run."""

    import_seconds: float  # of starting Python and importing the stage's script, with and without tracking
    seconds: float  # of the stage without tracking
    added_seconds: float  # by tracking
    database_bytes: int  # in `mlflow.db`
    artifact_bytes: int  # in `mlruns/`


@dataclass(frozen=True)
class Clone:
    """A clone of the repository, and the commands that a person would type in it."""

    folder: Path

    def run(self, *command: str) -> float:
        """Run a command in it; return the seconds that it took."""
        env = os.environ | {"PYTHONPATH": str(self.folder / "src")}
        started = time.perf_counter()
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return time.perf_counter() - started

    def python(self, *arguments: str) -> float:
        """Run this interpreter in it."""
        return self.run(sys.executable, *arguments)

    def set_tracking(self, *, on: bool) -> None:
        """Switch tracking in its `params.yaml`."""
        path = self.folder / "params.yaml"
        path.write_text(re.sub(r"(?m)^  tracking: \w+", f"  tracking: {str(on).lower()}", path.read_text()))

    def wait_for_shipping(self) -> None:
        """Wait until the store has what stages recorded, which they do not wait for."""
        while any((self.folder / ".gradtrail/records").glob("*/*")):
            time.sleep(0.05)

    def empty_store(self) -> int:
        """Bring back the store without runs; return the bytes in its database."""
        database, kept = self.folder / "mlflow.db", self.folder / ".gradtrail" / "empty.db"
        if not kept.exists():
            self.python("-c", "from gradtrail.tracking.store import open_store; open_store()")
            shutil.copy(database, kept)
        shutil.copy(kept, database)
        for row in (self.folder / "mlruns").glob("*/"):
            shutil.rmtree(row)
        (self.folder / ".gradtrail" / "synced.json").unlink(missing_ok=True)
        return self.database_bytes()

    def database_bytes(self) -> int:
        """Return the bytes that the database uses of its file, which has free pages from the start."""
        with contextlib.closing(sqlite3.connect(self.folder / "mlflow.db")) as database:
            pages, free, size = (
                database.execute(f"pragma {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        return int(pages - free) * int(size)


def make_clone(folder: Path) -> Clone:
    """Clone the repository, with what its `dvc.lock` names."""
    clone = Clone(folder)
    subprocess.run(["git", "clone", "-q", ".", str(folder)], check=True)
    shutil.copy("dvc.lock", folder)
    clone.python("-m", "dvc", "config", "--local", "cache.dir", str(cache_folder()))
    clone.python("-m", "dvc", "checkout", "dvc.yaml")  # the audit may never have run
    shutil.copytree("results/metrics", folder / "results/metrics", dirs_exist_ok=True)
    (folder / ".gradtrail").mkdir(exist_ok=True)
    return clone


def measure_run(clone: Clone, stage: str, rounds: int) -> RunCost:
    """Run a stage with tracking and without, in turn."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for on in (True, False):
            clone.set_tracking(on=on)
            empty = clone.empty_store()
            took = clone.python("-m", f"pipeline.{stage}")
            clone.wait_for_shipping()
            if number:
                seconds[on].append(took)
            if on:
                database = clone.database_bytes() - empty
                artifacts = sum(path.stat().st_size for path in (clone.folder / "mlruns").rglob("*") if path.is_file())
    without = statistics.median(seconds[False])
    added = statistics.median(on - off for on, off in zip(seconds[True], seconds[False], strict=True))
    imports = statistics.median(clone.python("-c", f"import pipeline.{stage}") for _ in range(rounds))
    return RunCost(
        import_seconds=imports, seconds=without, added_seconds=added, database_bytes=database, artifact_bytes=artifacts
    )


def measure_sync(clone: Clone, num_states: int) -> dict[str, float]:
    """Commit locks with other seeds; bring an empty store up to date, again with nothing to do, and with one more."""
    clone.set_tracking(on=True)
    yaml = YAML()
    path = clone.folder / "dvc.lock"
    lock = yaml.load(path)

    def commit(seed: int) -> None:
        lock["stages"]["train"]["params"]["params.yaml"]["train"]["seed"] = seed
        yaml.dump(lock, path)
        clone.run("git", "add", "-f", "dvc.lock", "results/metrics")
        clone.run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", f"seed {seed}")

    for seed in range(1000, 1000 + num_states):
        commit(seed)
    clone.empty_store()
    sync = ("-m", "gradtrail", "sync")
    found = {"all": clone.python(*sync)}
    found["nothing"] = statistics.median(clone.python(*sync) for _ in range(5))
    commit(1000 + num_states)
    found["one"] = clone.python(*sync)
    return found


def show_runs(rows: dict[str, RunCost]) -> None:
    """Print the costs stage by stage, and of all."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    table = Table(title=f"a stage's run (load averages at the end: {load}; {os.cpu_count()} cores)")
    table.add_column("stage")
    for title in ("imports, s", "without, s", "with, s", "with / without", "mlflow.db,\nKiB", "mlruns/,\nKiB"):
        table.add_column(title, justify="right")
    names = [field.name for field in dataclasses.fields(RunCost)]
    total = RunCost(**{name: sum(getattr(cost, name) for cost in rows.values()) for name in names})
    for stage, cost in (rows | {"all": total}).items():
        both = cost.seconds + cost.added_seconds
        sizes = (f"{size / 1024:,.0f}" for size in (cost.database_bytes, cost.artifact_bytes))
        seconds = (f"{each:.2f}" for each in (cost.import_seconds, cost.seconds, both))
        table.add_row(stage, *seconds, f"{both / cost.seconds:.2f}", *sizes)
    Console().print(table)


def show_syncs(syncs: dict[str, float], num_states: int) -> None:
    """Print the times of syncs."""
    table = Table(title=f"sync over {num_states} commits, each with another training")
    for title in ("all runs to make, s", "nothing to do, s", "one more, s"):
        table.add_column(title, justify="right")
    table.add_row(f"{syncs['all']:.1f}", f"{syncs['nothing']:.2f}", f"{syncs['one']:.1f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--states", type=int, default=50)
    parser.add_argument("--stages", type=lambda names: names.split(","), default=list(read_pipeline()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone = make_clone(Path(folder).resolve() / "clone")
        rows = {stage: measure_run(clone, stage, options.rounds) for stage in options.stages}
        show_runs(rows)
        syncs = measure_sync(clone, options.states) if options.states else {}
        if syncs:
            show_syncs(syncs, options.states)
    record("tracking", {"runs": {stage: vars(cost) for stage, cost in rows.items()}, "sync": syncs}, options)


if __name__ == "__main__":
    main()
