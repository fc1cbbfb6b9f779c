"""Runs of MLflow's store that belong to no recorded state: which ones, and how they are deleted with their artifacts.

A run is garbage if sync would not rebuild it. Open runs are kept; so are those that have only just ended, as DVC may
not have recorded them yet, those whose training can resume from a checkpoint, and the parents of runs that are kept.
Only in this repository's own database: on a server, or in a database elsewhere, runs may belong to other clones.
"""

import contextlib
import functools
import re
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
from gradtrail.tracking.lineage.recorded import RecordedStates, consistent_stages, last_stage
from gradtrail.tracking.mlflow.client import open_store, store_lock
from gradtrail.tracking.mlflow.links import PARENT
from gradtrail.tracking.mlflow.models import models_of, registered_models
from gradtrail.tracking.mlflow.relocate import local_path
from gradtrail.tracking.mlflow.search import RunIndex, deleted_runs, find_equivalent_run
from gradtrail.tracking.mlflow.stored_run import REPLACED
from gradtrail.tracking.mlflow.tags import is_alive, is_of_this_host
from gradtrail.tracking.sync.backfill import DUPLICATE, SETTLING_SECONDS

_MODELS = "models"  # folder in `mlruns/`, as MLflow names it


@dataclass(kw_only=True)
class LiveReferences:
    """What is recorded.

    Attributes:
        states: keys of states.
        run_ids: runs that represent them, or whose model has a version in MLflow's registry.
    """

    states: set[str] = field(default_factory=set)
    run_ids: set[str] = field(default_factory=set)


def live_references(client: MlflowClient, recorded: RecordedStates, index: RunIndex) -> LiveReferences:
    """Return what commits, experiments, the working folder and the run-cache record, and the runs that represent it."""
    found = LiveReferences()
    for stage in (stage for snapshot in recorded.snapshots for stage in consistent_stages(snapshot)):
        found.states.add(stage.state)
        if run := find_equivalent_run(index, stage):
            found.run_ids.add(run.info.run_id)
    found.run_ids |= {run.info.run_id for run in index.runs() if run.data.tags.get("state") in found.states}
    known = found.states | {index[run_id].data.tags["state"] for run_id in found.run_ids}
    for stage in map(last_stage, recorded.only_in_run_cache(known.__contains__)):
        found.states.add(stage.state)
        if run := find_equivalent_run(index, stage):
            found.run_ids.add(run.info.run_id)
    found.run_ids |= {name for name in registered_models(client) if name in index}
    return found


def unreferenced_runs(index: RunIndex, kept: LiveReferences, resumable: Collection[str]) -> list[Run]:
    """Return the runs that belong to no recorded state, the newest first.

    Args:
        index: all runs.
        kept: what is recorded, and what the registry needs.
        resumable: the first digits of the keys of states whose training can resume.
    """
    ours = [run for run in index.runs() if "state" in run.data.tags]
    stay = {run.info.run_id for run in ours if run.info.run_id in kept.run_ids or _must_stay(run, resumable)}
    stay |= {index[run_id].data.tags.get(PARENT, "") for run_id in stay}
    return [run for run in ours if run.info.run_id not in stay]


def as_garbage(client: MlflowClient, runs: list[Run]) -> Iterator[Garbage]:
    """Yield these runs, and those that were deleted before, as garbage."""
    for run in runs:
        ending = {"KILLED": "killed; ", "FAILED": "failed; "}.get(run.info.status, "")
        yield _garbage(client, run, f"{ending}its state is not recorded")
    registered = registered_models(client)
    for run in deleted_runs(client):
        has_version = any(model.model_id in registered for model in models_of(client, run))
        if not (_is_open(run) or has_version or run.info.run_id in registered):
            has_another = DUPLICATE in run.data.tags or REPLACED in run.data.tags
            why = "another run has its place" if has_another else "deleted in MLflow"
            yield _garbage(client, run, why)


def ownerless_artifacts() -> Iterator[Garbage]:
    """Yield folders of artifacts in `mlruns/` that belong to no run or model in any database of the root."""
    folder = root() / "mlruns"
    if folder.is_symlink() or not folder.is_dir():  # several clones may share a folder elsewhere
        return
    try:
        known = {found for database in root().iterdir() for found in _ids(database)}
    except sqlite3.DatabaseError:  # one that was set aside as damaged: what it names cannot be known
        return
    for path in sorted([*folder.iterdir(), *folder.glob(f"{_MODELS}/*")]):
        is_ours = len(path.name.removeprefix("m-")) == PREFIX and path.name.removeprefix("m-").isalnum()
        if is_ours and path.name not in known:
            yield Garbage(
                what="artifacts",
                name=path.relative_to(root()).as_posix(),
                why="they belong to no run",
                size_bytes=size_of(path),
                remove=functools.partial(shutil.rmtree, path),
            )


def shrink(database: Path) -> int:
    """Free the space of deleted records; return how many bytes, 0 while other processes use the database."""
    before = database.stat().st_size
    with (
        store_lock(f"{SQLITE}{database}"),
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(database)) as store,
    ):
        store.execute("vacuum")
    return before - database.stat().st_size


def open_index() -> tuple[MlflowClient, RunIndex]:
    """Open the store and read all its runs."""
    client = open_store()
    return client, RunIndex(client)


def _garbage(client: MlflowClient, run: Run, why: str) -> Garbage:
    run_id = run.info.run_id
    return Garbage(
        what="run",
        name=f"{run.info.run_name} ({run_id[:8]})",
        why=why,
        size_bytes=sum(map(size_of, _own_folders(run, list(models_of(client, run))))),
        remove=lambda: _purge(client, run_id),
    )


def _purge(client: MlflowClient, run_id: str) -> None:
    """Remove a run, its models and its artifacts, unless a process opened it meanwhile.

    Marked as deleted first: after an interruption it is found among the deleted runs the next time.
    """
    with store_lock(client.tracking_uri):
        run = client.get_run(run_id)
        if _is_open(run):
            return
        if run.info.lifecycle_stage == "active":
            client.delete_run(run_id)
        models = list(models_of(client, run))
        for folder in _own_folders(run, models):
            shutil.rmtree(folder, ignore_errors=True)
        store = _get_store(client.tracking_uri)  # what follows is as `mlflow gc` does it
        for model in models:
            store._hard_delete_logged_model(model.model_id)
        store._hard_delete_run(run_id)


def _own_folders(run: Run, models: list[LoggedModel]) -> list[Path]:
    """Return the folders of a run's artifacts and models, as far as they are in this repository's `mlruns/`."""
    folder = root() / "mlruns"
    places = [(folder, run.info.run_id, run.info.artifact_uri)]
    places += [(folder / _MODELS, model.model_id, model.artifact_location) for model in models]
    is_name = re.compile(r"[\w-]+").fullmatch  # an id that a damaged store has may be a path
    return [
        above / name
        for above, name, location in places
        if is_name(name) and (path := local_path(location)) and path.parent == above / name
    ]


def _must_stay(run: Run, resumable: Collection[str]) -> bool:
    """Whether a run whose state is not recorded is to be kept for now."""
    if run.info.status == "FINISHED":
        return time.time() - run.info.end_time / 1000 < SETTLING_SECONDS
    return _is_open(run) or run.data.tags["state"][:PREFIX] in resumable


def _is_open(run: Run) -> bool:
    """Whether a process may work on a run: here, or, unless the run was deleted, on another host."""
    is_elsewhere = run.info.lifecycle_stage == "active" and not is_of_this_host(run.data.tags)
    return run.info.status == "RUNNING" and (is_elsewhere or is_alive(run.data.tags))


def _ids(database: Path) -> set[str]:
    """Return the ids of runs and models in a database, deleted ones too; empty for any other kind of file."""
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
