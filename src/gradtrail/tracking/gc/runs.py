"""Rows of MLflow's store that nothing refers to: which ones, and how they and their artifacts are removed for good.

A row goes when sync would not make it again. One that is open stays; so do one that has only just ended, as DVC may not
have noted it yet, one whose training can go on from a checkpoint, and one that a row which stays hangs below. Only of
this repository's own database: on a server, or in a database elsewhere, rows may be those of other clones.
"""

import contextlib
import functools
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, Run
from mlflow.tracking import _get_store

from gradtrail.support.paths import SQLITE, root
from gradtrail.tracking.gc.files import PREFIX, Garbage, size_of
from gradtrail.tracking.lineage.recorded import Recorded, consistent_stages, last_stage
from gradtrail.tracking.mlflow.client import open_store, store_lock
from gradtrail.tracking.mlflow.links import PARENT
from gradtrail.tracking.mlflow.models import models_of
from gradtrail.tracking.mlflow.relocate import local_path
from gradtrail.tracking.mlflow.search import RunIndex, deleted_runs, find_equivalent_run, is_whole
from gradtrail.tracking.mlflow.tags import is_alive, is_of_this_host
from gradtrail.tracking.sync.backfill import DUPLICATE

_MODELS = "models"  # folder in `mlruns/`, by MLflow's choice
_SETTLING_SECONDS = 120  # from a row's end until DVC has surely noted the state


@dataclass(kw_only=True)
class LiveReferences:
    """What something refers to.

    Attributes:
        states: their keys.
        entries: likewise.
        run_ids: rows that stand for them.
    """

    states: set[str] = field(default_factory=set)
    entries: set[str] = field(default_factory=set)
    run_ids: set[str] = field(default_factory=set)


def referred(recorded: Recorded, index: RunIndex) -> LiveReferences:
    """Return what commits, experiments, the working folder and the run-cache refer to, and the rows that sync finds."""
    found = LiveReferences()
    for stage in (stage for snapshot in recorded.snapshots for stage in consistent_stages(snapshot)):
        found.states.add(stage.state)
        found.entries.add(stage.entry_key)
        if row := find_equivalent_run(index, stage):
            found.run_ids.add(row.info.run_id)
    found.run_ids |= {row.info.run_id for row in index.rows() if row.data.tags.get("state") in found.states}
    found.entries |= {index[run_id].data.tags.get("entry", "") for run_id in found.run_ids}
    for stage in map(last_stage, recorded.only_ran(found.entries.__contains__)):
        found.states.add(stage.state)
        alike = (row for row in index({"entry": stage.entry_key}) if is_whole(row))
        if row := find_equivalent_run(index, stage) or next(alike, None):
            found.run_ids.add(row.info.run_id)
    return found


def rows_to_go(index: RunIndex, kept: LiveReferences, resumable: Collection[str]) -> list[Run]:
    """Return the rows that nothing refers to, the newest first.

    Args:
        index: all rows.
        kept: what is referred to.
        resumable: the first digits of the keys of states that a training can go on with.
    """
    ours = [row for row in index.rows() if "state" in row.data.tags]
    stay = {row.info.run_id for row in ours if row.info.run_id in kept.run_ids or _waits(row, resumable)}
    stay |= {index[run_id].data.tags.get(PARENT, "") for run_id in stay}
    return [row for row in ours if row.info.run_id not in stay]


def as_garbage(client: MlflowClient, rows: list[Run]) -> Iterator[Garbage]:
    """Yield rows that go, and those that were deleted before."""
    for row in rows:
        ending = {"KILLED": "killed; ", "FAILED": "failed; "}.get(row.info.status, "")
        yield _garbage(client, row, f"{ending}nothing refers to its state")
    for row in deleted_runs(client):
        if not _is_open(row):
            why = "repeated another row" if DUPLICATE in row.data.tags else "deleted in MLflow"
            yield _garbage(client, row, why)


def ownerless_artifacts() -> Iterator[Garbage]:
    """Yield folders of artifacts in `mlruns/` that no row or model has, in no database of the root."""
    folder = root() / "mlruns"
    if folder.is_symlink() or not folder.is_dir():  # a folder elsewhere may be of several clones
        return
    known = {found for database in root().iterdir() for found in _ids(database)}
    for path in sorted([*folder.iterdir(), *folder.glob(f"{_MODELS}/*")]):
        is_ours = len(path.name.removeprefix("m-")) == PREFIX and path.name.removeprefix("m-").isalnum()
        if is_ours and path.name not in known:
            yield Garbage(
                what="artifacts",
                name=path.relative_to(root()).as_posix(),
                why="no row has them",
                size_bytes=size_of(path),
                remove=functools.partial(shutil.rmtree, path),
            )


def shrink(database: Path) -> int:
    """Return the room of what was removed to the system; return how many bytes, none while others use the database."""
    before = database.stat().st_size
    with (
        store_lock(f"{SQLITE}{database}"),
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(database)) as store,
    ):
        store.execute("vacuum")
    return before - database.stat().st_size


def open_index() -> tuple[MlflowClient, RunIndex]:
    """Open the store and read all its rows."""
    client = open_store()
    return client, RunIndex(client)


def _garbage(client: MlflowClient, row: Run, why: str) -> Garbage:
    run_id = row.info.run_id
    return Garbage(
        what="row",
        name=f"{row.info.run_name} ({run_id[:8]})",
        why=why,
        size_bytes=sum(map(size_of, _own_folders(row, list(models_of(client, row))))),
        remove=lambda: _purge(client, run_id),
    )


def _purge(client: MlflowClient, run_id: str) -> None:
    """Remove a row, its models and its artifacts, unless a process opened it meanwhile.

    Deleted in MLflow's sense first: what is interrupted after that is found among the deleted rows the next time.
    """
    with store_lock(client.tracking_uri):
        row = client.get_run(run_id)
        if _is_open(row):
            return
        if row.info.lifecycle_stage == "active":
            client.delete_run(run_id)
        models = list(models_of(client, row))
        for folder in _own_folders(row, models):
            shutil.rmtree(folder, ignore_errors=True)
        store = _get_store(client.tracking_uri)  # what follows is as `mlflow gc` does it
        for model in models:
            store._hard_delete_logged_model(model.model_id)
        store._hard_delete_run(run_id)


def _own_folders(row: Run, models: list[LoggedModel]) -> list[Path]:
    """Return the folders in `mlruns/` of a row's artifacts and models; those that lie elsewhere are others'."""
    places = {f"mlruns/{row.info.run_id}": row.info.artifact_uri}
    places |= {f"mlruns/{_MODELS}/{model.model_id}": model.artifact_location for model in models}
    paths = {root() / own: local_path(location) for own, location in places.items()}
    return [own for own, path in paths.items() if path and path.parent == own]


def _waits(row: Run, resumable: Collection[str]) -> bool:
    """Whether a row that nothing refers to has to stay for now."""
    if row.info.status == "FINISHED":
        return time.time() - row.info.end_time / 1000 < _SETTLING_SECONDS
    return _is_open(row) or row.data.tags["state"][:PREFIX] in resumable


def _is_open(row: Run) -> bool:
    """Whether a process may be at work on a row: here, or, unless the row was deleted, on another host."""
    is_elsewhere = row.info.lifecycle_stage == "active" and not is_of_this_host(row.data.tags)
    return row.info.status == "RUNNING" and (is_elsewhere or is_alive(row.data.tags))


def _ids(database: Path) -> set[str]:
    """Return the rows and models of a database, deleted ones too; none of a file that is no database of MLflow's."""
    if not database.is_file():
        return set()
    with database.open("rb") as file:
        if not file.read(16).startswith(b"SQLite format 3"):
            return set()
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as store:
        if not store.execute("select 1 from sqlite_master where name = 'runs'").fetchone():
            return set()
        found = store.execute("select run_uuid from runs union select model_id from logged_models")
        return {name for (name,) in found}
