"""Brings MLflow's store up to date: a run for every state that was made, headline metrics on every training's run.

Where DVC skips or restores a stage, no code of this project runs; this closes that gap. States are looked for in the
working folder's `dvc.lock`, in every commit's, in DVC's experiments and in its run-cache. A run that was lost, or never
written because the store was out of reach, is rebuilt from the outs in DVC's cache; not where another run has the same
params and the same outs and differs in code alone. A rebuilt run has the tag `rebuilt`, and lacks what is not in the
outs: times, system metrics, metrics of compiling, Orbax checkpoints, `git.diff`, and, for a state that only the
run-cache has, commit and experiment.

Whether anything has changed since the last sync is found out without importing MLflow or DVC: one digest covers the
`dvc.yaml` and `dvc.lock` of the working folder, commits and experiments, the contents of DVC's cache, the database and
which of its runs are open. A store that was moved counts as changed until it is relocated. A server is always asked.
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
    """The digest of all that a sync reads beside the store, taken when this is created.

    Later changes are for the next sync.
    """

    def __init__(self) -> None:
        self._uri = store_uri()
        self._sources = list(_sources())

    def read(self) -> dict[str, Any] | None:
        """Return the report of the last sync, if nothing has changed since."""
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
        """Write the report of a sync, and which runs it leaves open because their processes are on other hosts."""
        if self._uri.startswith(SQLITE):
            with atomic_file(_place()) as temporary:
                temporary.write_text(json.dumps({"key": self._key(open_runs), "report": report}))

    def forget(self) -> None:
        """Make the next sync read everything."""
        _place().unlink(missing_ok=True)

    def _key(self, open_runs: Iterable[str]) -> str:
        database = database_path(self._uri)
        files = [database, database.with_name(f"{database.name}-wal")]
        store = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]
        content = json.dumps([self._uri, self._sources, store, sorted(open_runs)])
        return hashlib.sha256(content.encode()).hexdigest()


def _sources() -> Iterator[object]:
    """Yield what identifies the pipelines, locks and files that a sync reads."""
    for name in FILES:
        path = working_folder() / name
        yield hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    yield head_commit()
    refs = git("for-each-ref", "--format=%(objectname) %(refname)").splitlines()
    yield [line for line in refs if " refs/exps/" not in line]
    yield sorted((one.name, one.baseline, one.commit) for one in find_experiments())
    yield [path.name for path in entry_files()]
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
    """Rename the database, with what SQLite keeps beside it, to a name that is free; return that of the database.

    Raises:
        UserError: the store is a server's.
    """
    if not store_uri().startswith(SQLITE):
        raise UserError(f"{store_uri()}: its database is damaged, which can only be mended there")
    database = database_path(store_uri())
    number = next(n for n in itertools.count(1) if not database.with_name(f"{database.name}.damaged-{n}").exists())
    for suffix in ("-wal", "-shm", ""):
        path = database.with_name(f"{database.name}{suffix}")
        if path.exists():
            aside = path.rename(database.with_name(f"{database.name}.damaged-{number}{suffix}"))
    return aside


def sync() -> SyncReport:
    """Backfill the runs of all states; return at once where nothing has changed since the last time.

    Raises:
        UserError: git fails, or the `dvc.yaml` or `dvc.lock` of the working folder cannot be read.
    """
    stamp = SyncFingerprint()
    if last := stamp.read():
        return SyncReport(**last)
    from gradtrail.tracking.sync.backfill import backfill  # late: it imports MLflow

    with FileLock(private_folder() / "sync.lock"):
        report, open_runs = backfill()
        if open_runs is None:
            stamp.forget()
        else:
            stamp.write(dataclasses.asdict(report.afterwards), open_runs)
    return report
