"""Whether anything has changed since the last sync: told in a moment, without MLflow and without DVC.

What a sync looks at is written down in one digest: pipeline and lock of the working folder, commits and experiments,
what DVC's cache has, the store's database and which of its rows are open. A store that was moved counts as changed
until it is led to its new place. Of a server nothing can be told so: it is always asked.

Bring MLflow's store up to date: every state that was made has its row, and each training's row its headlines.

Where DVC skips or restores a stage, none of our code runs; this closes that gap. States are looked for in the working
folder's `dvc.lock`, in every commit's, in DVC's experiments and in its run-cache. A row that was lost, or never written
because the store was out of reach, is made again from the outs, which DVC's cache has; a commit's only where no row
differs from it in code alone, with the same params and the same bytes. What cannot be had from the outs is absent, and
the row carries the tag `rebuilt`: times, system metrics, figures of compiling that differ from run to run, Orbax
checkpoints, `git.diff`, and of a state that only the run-cache has, commit and experiment.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from gradtrail.stages.common.files import atomic_file
from gradtrail.support.git import git
from gradtrail.support.paths import SQLITE, database_path, private_folder, store_uri, working_folder
from gradtrail.tracking.lineage.dvc_cache import file_folder
from gradtrail.tracking.lineage.recorded import entry_files
from gradtrail.tracking.lineage.snapshots import find_experiments
from gradtrail.tracking.mlflow.relocate import is_moved
from gradtrail.tracking.sync.report import SyncReport


class Stamp:
    """What a sync looks at beside the store, as it is when this is made: what changes later is for the next one."""

    def __init__(self) -> None:
        self._uri = store_uri()
        self._sources = list(_sources())

    def read(self) -> dict[str, Any] | None:
        """Return what the last sync reported, if nothing has changed since."""
        if not self._uri.startswith(SQLITE):
            return None
        try:
            last = json.loads(_place().read_bytes())
            is_same = last["key"] == self._key(_open_rows(self._uri)) and not is_moved(self._uri)
            return last["report"] if is_same else None
        except (OSError, ValueError, KeyError, TypeError, sqlite3.Error):
            return None

    def write(self, report: dict[str, Any], open_rows: Iterable[str]) -> None:
        """Note what a sync reports, and which rows it leaves open because they are not of this host."""
        if self._uri.startswith(SQLITE):
            with atomic_file(_place()) as beside:
                beside.write_text(json.dumps({"key": self._key(open_rows), "report": report}))

    def forget(self) -> None:
        """Let the next sync look at everything."""
        _place().unlink(missing_ok=True)

    def _key(self, open_rows: Iterable[str]) -> str:
        database = database_path(self._uri)
        files = [database, database.with_name(f"{database.name}-wal")]
        store = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]
        content = json.dumps([self._uri, self._sources, store, sorted(open_rows)])
        return hashlib.sha256(content.encode()).hexdigest()


def _sources() -> Iterator[object]:
    """Yield what tells one collection of pipelines, locks and files from another."""
    for name in ("dvc.yaml", "dvc.lock"):
        path = working_folder() / name
        yield hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    yield git("rev-parse", "HEAD")
    refs = git("for-each-ref", "--format=%(objectname) %(refname)").splitlines()
    yield [line for line in refs if " refs/exps/" not in line]
    yield sorted((one.name, one.baseline, one.commit) for one in find_experiments())
    yield [path.name for path in entry_files()]
    with contextlib.suppress(OSError), os.scandir(file_folder()) as folders:
        yield sorted((folder.name, folder.stat().st_mtime_ns) for folder in folders)


def _open_rows(uri: str) -> list[str]:
    path = database_path(uri)
    query = "select run_uuid from runs where status = 'RUNNING' and lifecycle_stage = 'active'"
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as store:
        return [run for (run,) in store.execute(query)]


def _place() -> Path:
    return private_folder() / "synced.json"


def sync() -> SyncReport:
    """Give every state its row. Where nothing has changed since the last time, that is found out without MLflow."""
    stamp = Stamp()
    if last := stamp.read():
        return SyncReport(**last)
    from gradtrail.tracking.sync.backfill import backfill  # late: it imports MLflow

    with FileLock(private_folder() / "sync.lock"):
        report, open_rows = backfill()
        if open_rows is None:
            stamp.forget()
        else:
            stamp.write(dataclasses.asdict(report.afterwards), open_rows)
    return report
