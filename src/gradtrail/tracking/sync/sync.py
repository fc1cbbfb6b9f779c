"""Brings MLflow's store up to date: a run for every state that was made, headline metrics on every training's run.

If DVC skips or restores a stage, no code of this project runs; a sync closes that gap. It reads states from the working
folder's `dvc.lock`, from every commit's, from DVC's experiments and from its run-cache. A run that was lost, or not
logged because the store was unreachable, is rebuilt from the outputs in DVC's cache, unless another run has the same
params and outputs and differs only in code. A rebuilt run has the tag `rebuilt`, and lacks what is not in the outputs:
times, system metrics, metrics of compiling, Orbax checkpoints, `git.diff`, and, for a state that only the run-cache
has, commit and experiment.

A sync with nothing to do imports neither MLflow nor DVC: one digest covers the `dvc.yaml` and `dvc.lock` of the working
folder, commits and experiments, the contents of DVC's cache, the database and its open runs. A store that was moved
counts as changed until it is relocated. A server is always queried.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from gradtrail.stages.common.dvc_cache import file_folder
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.pipeline_file import FILES
from gradtrail.support.errors import UserError
from gradtrail.support.git import git, head_commit
from gradtrail.support.paths import SQLITE, database_path, private_folder, store_uri, working_folder
from gradtrail.tracking.lineage.recorded import entry_files
from gradtrail.tracking.lineage.snapshots import find_experiments
from gradtrail.tracking.mlflow.relocate import is_moved
from gradtrail.tracking.sync.report import SyncReport


class SyncFingerprint:
    """Hash of all inputs of a sync, taken at construction. Later changes are for the next sync."""

    def __init__(self) -> None:
        self._uri = store_uri()
        self._sources = list(_sources())

    def read(self) -> dict[str, Any] | None:
        """Return the report of the last sync if nothing has changed since."""
        if not self._uri.startswith(SQLITE):
            return None
        try:
            last = json.loads(_place().read_bytes())
            key, report = last["key"], last["report"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        try:
            is_same = key == self._key(_open_runs(self._uri)) and not is_moved(self._uri)
        except (OSError, sqlite3.Error):
            return None
        return report if is_same else None

    def write(self, report: dict[str, Any], open_runs: Iterable[str]) -> None:
        """Write the report of a sync, and the runs that stay open because their processes are on other hosts."""
        if self._uri.startswith(SQLITE):
            with atomic_file(_place()) as temporary:
                temporary.write_text(json.dumps({"key": self._key(open_runs), "report": report}))

    def forget(self) -> None:
        """Make the next sync read all inputs."""
        _place().unlink(missing_ok=True)

    def _key(self, open_runs: Iterable[str]) -> str:
        database = database_path(self._uri)
        files = [database, database.with_name(f"{database.name}-wal")]
        store = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]
        content = json.dumps([self._uri, self._sources, store, sorted(open_runs)])
        return hashlib.sha256(content.encode()).hexdigest()


def _sources() -> Iterator[object]:
    """Yield values that identify the pipelines, locks and files that a sync reads."""
    for name in FILES:
        path = working_folder() / name
        yield hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    yield head_commit()
    refs = git("for-each-ref", "--format=%(objectname) %(refname)").splitlines()
    yield [line for line in refs if " refs/exps/" not in line]
    yield sorted((one.name, one.baseline, one.commit) for one in find_experiments())
    yield [path.name for path in entry_files()]
    yield sorted(str(path) for path in private_folder().glob("journal/*/*"))
    with contextlib.suppress(OSError), os.scandir(file_folder()) as folders:
        yield sorted((folder.name, folder.stat().st_mtime_ns) for folder in folders)


def _open_runs(uri: str) -> list[str]:
    path = database_path(uri)
    query = "select run_uuid from runs where status = 'RUNNING' and lifecycle_stage = 'active'"
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as store:
        return [run for (run,) in store.execute(query)]


def _place() -> Path:
    return private_folder() / "synced.json"


def set_aside() -> Path:
    """Rename the database and SQLite's files next to it to free names; return the database's.

    Raises:
        UserError: The store is a server.
    """
    if not store_uri().startswith(SQLITE):
        raise UserError(f"{store_uri()}: its database is damaged; repair it on the server")
    database = database_path(store_uri())
    number = next(n for n in itertools.count(1) if not database.with_name(f"{database.name}.damaged-{n}").exists())
    for suffix in ("-wal", "-shm", ""):
        path = database.with_name(f"{database.name}{suffix}")
        if path.exists():
            aside = path.rename(database.with_name(f"{database.name}.damaged-{number}{suffix}"))
    return aside


def sync() -> SyncReport:
    """Backfill the runs of all states; do nothing if nothing has changed since the last sync.

    Raises:
        UserError: git fails, or the `dvc.yaml` or `dvc.lock` of the working folder cannot be read.
    """
    fingerprint = SyncFingerprint()
    if last := fingerprint.read():
        return SyncReport(**last)
    from gradtrail.tracking.sync.backfill import backfill  # late: it imports MLflow

    with FileLock(private_folder() / "sync.lock"):
        report, open_runs = backfill()
        if open_runs is None:
            fingerprint.forget()
        else:
            fingerprint.write(dataclasses.asdict(report.afterwards), open_runs)
    return report
