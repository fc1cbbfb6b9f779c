"""`gradtrail gc`: removes what is 30 days old and belongs to no recorded state: runs, and folders of stopped stages.

A state is recorded by the working folder's `dvc.lock`, by a commit of any branch or tag, by an experiment, or by an
entry of the run-cache whose files DVC's cache still has; so after `gradtrail gc`, `gradtrail sync` has nothing to
rebuild. Runs that other clones made or use stay. Out of scope: DVC's cache, which `dvc gc` cleans, the cache of
compiled functions, and runs on a server or in a database elsewhere, whose records may not be logged yet either.
"""

import contextlib
import io
import sqlite3
import sys
import time
from pathlib import Path

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Run, ViewType

from gradtrail.support.errors import UserError
from gradtrail.support.git import git, is_in_repository
from gradtrail.support.paths import database_path, private_folder, store_uri
from gradtrail.tracking.dvc_history import RecordedStates, consistent_stages, recorded_states
from gradtrail.tracking.leftovers import KEPT_SECONDS, remove_unused, unused_folders
from gradtrail.tracking.models import models_of, registered_models
from gradtrail.tracking.relocate import own_database
from gradtrail.tracking.run_cache import only_in_run_cache
from gradtrail.tracking.runs import RunIndex, find_equivalent_run, search
from gradtrail.tracking.state import RecordedState
from gradtrail.tracking.store import open_store, store_lock
from gradtrail.tracking.sync import sync
from gradtrail.tracking.tags import CLONE, PARENT, REPLACED, clone_id, outputs

_LAST_LINE = "DVC's cache is unchanged; after `dvc gc`, `gradtrail gc` removes the runs of what was deleted from it."


def collect_garbage(*, yes: bool) -> None:
    """List what belongs to no recorded state; remove it if `yes`, or if a person on a terminal agrees."""
    if is_in_repository() and not git("rev-parse", "--git-dir"):
        raise UserError("git is not installed, so the commits, which may record states, cannot be read")
    if (database := own_database(store_uri())) is None:
        print("runs and their records are kept: other clones may use this store")
    elif database.exists():
        sync()  # rebuild what has no run yet, so that a run which represents several states is known as such
    runs, folders = _find_garbage(database)
    if not (runs or folders):
        print(f"nothing to remove. {_LAST_LINE}")
        return
    names = [f"run {run.info.run_name} ({run_id[:8]})" for run_id, run in runs.items()]
    names += sorted(f"{folder.parent.name}/{folder.name}" for folder in folders)
    print("unused for 30 days, and not referenced by any recorded state:", *names, sep="\n")
    if yes or _agrees():
        # A person may have taken days to agree: what is needed by now, or in use, stays
        with FileLock(private_folder() / "sync.lock"), store_lock(store_uri()):
            unneeded, unused = _find_garbage(database)
            if purged := [run for run_id, run in unneeded.items() if run_id in runs]:
                purge(open_store(), purged)
            for folder in unused & folders:
                remove_unused(folder)
        print(f"removed: {len(purged) + sum(not folder.exists() for folder in folders)}")
    print(_LAST_LINE)


def _find_garbage(database: Path | None) -> tuple[dict[str, Run], set[Path]]:
    """Return the unneeded runs of this repository's database, by their ids, and the unused folders."""
    runs = unneeded_runs(open_store(), recorded_states()) if database and database.exists() else []
    return {run.info.run_id: run for run in runs}, {*unused_folders(records=database is not None)}


def unneeded_runs(client: MlflowClient, recorded: RecordedStates) -> list[Run]:
    """Return this clone's runs that were deleted 30 days ago, or ended then and belong to no recorded state.

    Runs that MLflow's registry needs, their children, and parents of runs that are kept, are needed too. It is an error
    if nothing is recorded at all: then the records were lost, and no run is known to be unneeded.
    """
    index, registered = RunIndex(client), registered_models(client)
    needed = _recorded_runs(index, recorded)
    active = [run for run in index.runs() if "state" in run.data.tags and run.info.run_id not in needed]
    if active and not recorded.snapshots:
        raise UserError("no dvc.lock here nor in any commit, so it is unknown which runs are still needed")
    if recorded.num_unreadable:
        print(f"{recorded.num_unreadable} commits cannot be read; the list may include what only they refer to")
    last = (time.time() - KEPT_SECONDS) * 1000
    deleted = _rows(client, "select run_uuid from runs where lifecycle_stage = 'deleted' and deleted_time < ?", last)
    old = [run for run in active if run.info.end_time and run.info.end_time < last]
    old += [run for run in search(client, view=ViewType.DELETED_ONLY) if run.info.run_id in deleted]
    unneeded = {
        run.info.run_id: run
        for run in old
        if run.data.tags.get(CLONE) == clone_id() and not registered & {run.info.run_id, run.data.tags.get(PARENT)}
    }
    parents = {run.data.tags.get(PARENT) for run in index.runs() if run.info.run_id not in unneeded}
    return [run for run_id, run in unneeded.items() if run_id not in parents]


def _recorded_runs(index: RunIndex, recorded: RecordedStates) -> set[str]:
    """Return the ids of the runs that represent recorded states."""
    stages = [stage for snapshot in recorded.snapshots for stage in consistent_stages(snapshot)]
    states = {stage.state for stage in stages}
    run_ids = {run.info.run_id for run in index.runs() if run.data.tags.get("state") in states}
    run_ids |= {run.info.run_id for stage in stages if (run := _needed_run(index, stage))}
    states |= {index[run_id].data.tags["state"] for run_id in run_ids}
    cached = only_in_run_cache(recorded.snapshots, states.__contains__)
    stages = [RecordedState([*snapshot.lock][-1], snapshot=snapshot) for snapshot in cached]
    return run_ids | {run.info.run_id for stage in stages if (run := _needed_run(index, stage))}


def _needed_run(index: RunIndex, stage: RecordedState) -> Run | None:
    """Return the run that represents a recorded state, or else one that shows that other inputs made its outputs."""
    outs = stage.out_digests()
    writers = (run for run in index.runs() if outputs(run.data.tags) == outs)
    return find_equivalent_run(index, stage) or next(writers, None)


def purge(client: MlflowClient, runs: list[Run]) -> None:
    """Remove runs and their models for good, by what `mlflow gc` calls: that removes all deleted models too."""
    from mlflow.cli import _gc_tracking_resources  # late: it imports MLflow's whole command line
    from mlflow.tracking import _get_store

    uri = client.tracking_uri
    models = set[str]()
    with store_lock(uri), contextlib.redirect_stdout(io.StringIO()):
        for run in runs:
            for model in models_of(client, run):
                client.delete_logged_model(model.model_id)
            of_run = "select model_id from logged_models where lifecycle_stage = 'deleted' and source_run_id = ?"
            models |= _rows(client, of_run, run.info.run_id)
            if run.info.lifecycle_stage == LifecycleStage.ACTIVE:
                client.set_tag(run.info.run_id, REPLACED, "")  # no person deleted it, if this is interrupted
                client.delete_run(run.info.run_id)
        _gc_tracking_resources(
            _get_store(uri),
            run_ids=[run.info.run_id for run in runs],
            logged_model_ids=[*models],
            experiment_ids=None,
            older_than=None,
            time_delta=0,
            skip_experiments=True,
            skip_logged_models=False,
        )


def _rows(client: MlflowClient, query: str, value: str | float) -> set[str]:
    """Return the first column of a query to this repository's database."""
    with contextlib.closing(sqlite3.connect(database_path(client.tracking_uri))) as store:
        return {row[0] for row in store.execute(query, (value,))}


def _agrees() -> bool:
    """Ask for confirmation, if there is a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("nothing removed: not interactive; pass --yes")
        return False
    with contextlib.suppress(EOFError):
        return input("Remove all this? [y/N] ").strip().lower() in ("y", "yes")
    return False
