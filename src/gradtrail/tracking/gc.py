"""`gradtrail gc`: removes what is 30 days old and belongs to no recorded state: runs, and folders of stopped stages.

A state is recorded by the working folder's `dvc.lock`, by a commit of any branch or tag, by an experiment, or by an
entry of the run-cache whose files DVC's cache still has; so after `gradtrail gc`, `gradtrail sync` has nothing to
rebuild. `mlflow gc` removes the runs. Out of scope: DVC's cache, which `dvc gc` cleans, the cache of compiled
functions, and runs on a server or in a database elsewhere, which may belong to other clones.
"""

import contextlib
import io
import shutil
import sys
import time

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Run, ViewType
from rich.filesize import decimal

from gradtrail.support.errors import UserError
from gradtrail.support.git import git, is_in_repository
from gradtrail.support.paths import private_folder, store_uri
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import table
from gradtrail.tracking.models import models_of, registered_models
from gradtrail.tracking.recorded import RecordedStates, consistent_stages, last_stage, recorded_states
from gradtrail.tracking.relocate import local_path, own_database
from gradtrail.tracking.runs import RunIndex, find_equivalent_run, search
from gradtrail.tracking.state import Identity
from gradtrail.tracking.store import open_store, store_lock
from gradtrail.tracking.sync import sync
from gradtrail.tracking.tags import PARENT, outputs
from gradtrail.tracking.unused import KEPT_SECONDS, size_of, unused_folders

_LAST_LINE = "DVC's cache is unchanged; after `dvc gc`, `gradtrail gc` removes the runs of what was deleted from it."


def collect_garbage(*, yes: bool) -> None:
    """List what belongs to no recorded state; remove it if `yes`, or if a person on a terminal agrees."""
    if is_in_repository() and not git("rev-parse", "--git-dir"):
        raise UserError("git is not installed, so the commits, which may record states, cannot be read")
    client, runs = None, list[Run]()
    if (database := own_database(store_uri())) is None:
        print("runs are kept: other clones may use this store")
    elif database.exists():
        sync()  # rebuild what has no run yet, so that a run which represents several states is known as such
        client = open_store()
        runs = unneeded_runs(client, recorded_states())
    folders = sorted(unused_folders())
    if not (runs or folders):
        print(f"nothing to remove. {_LAST_LINE}")
        return
    artifacts = [local_path(run.info.artifact_uri) for run in runs]
    sizes = [size_of(folder) if folder else 0 for folder in [*artifacts, *folders]]
    names = [f"run {run.info.run_name} ({run.info.run_id[:8]})" for run in runs]
    names += [f"{folder.parent.name}/{folder.name}" for folder in folders]
    rows = [{"unused for 30 days": name, "size": decimal(size)} for name, size in zip(names, sizes, strict=True)]
    stdout_console().print(table("not referenced by any recorded state", rows, right=["size"]))
    if yes or _agrees():
        with FileLock(private_folder() / "sync.lock"):
            if client and runs:
                purge(client, runs)
            for folder in folders:
                shutil.rmtree(folder)
        print(f"removed: {len(rows)}, {decimal(sum(sizes))}")
    print(_LAST_LINE)


def unneeded_runs(client: MlflowClient, recorded: RecordedStates) -> list[Run]:
    """Return the runs that ended 30 days ago and are deleted, or belong to no recorded state.

    Runs whose model has a version in MLflow's registry, and parents of runs that are kept, are needed too. It is an
    error if nothing is recorded at all: then the records were lost, and no run is known to be unneeded.
    """
    for experiment in client.search_experiments(ViewType.DELETED_ONLY):
        name, restore = experiment.name, f"mlflow experiments restore --experiment-id {experiment.experiment_id}"
        raise UserError(f"MLflow's experiment {name!r} was deleted, and `mlflow gc` would remove it; first `{restore}`")
    index, registered = RunIndex(client), registered_models(client)
    needed = _recorded_runs(index, recorded)
    active = [run for run in index.runs() if "state" in run.data.tags and run.info.run_id not in needed]
    if active and not recorded.snapshots:
        raise UserError("no dvc.lock here nor in any commit, so it is unknown which runs are still needed")
    if recorded.num_unreadable:
        print(f"{recorded.num_unreadable} commits cannot be read; the list may include what only they refer to")
    last = (time.time() - KEPT_SECONDS) * 1000
    old = {
        run.info.run_id: run
        for run in [*active, *search(client, view=ViewType.DELETED_ONLY)]
        if run.info.end_time and run.info.end_time < last and run.info.run_id not in registered
    }
    parents = {run.data.tags.get(PARENT) for run in index.runs() if run.info.run_id not in old}
    return [run for run_id, run in old.items() if run_id not in parents]


def _recorded_runs(index: RunIndex, recorded: RecordedStates) -> set[str]:
    """Return the ids of the runs that represent recorded states."""
    stages = [stage for snapshot in recorded.snapshots for stage in consistent_stages(snapshot)]
    states = {stage.state for stage in stages}
    run_ids = {run.info.run_id for run in index.runs() if run.data.tags.get("state") in states}
    run_ids |= {run.info.run_id for stage in stages if (run := _needed_run(index, stage))}
    states |= {index[run_id].data.tags["state"] for run_id in run_ids}
    cached = map(last_stage, recorded.only_in_run_cache(states.__contains__))
    return run_ids | {run.info.run_id for stage in cached if (run := _needed_run(index, stage))}


def _needed_run(index: RunIndex, stage: Identity) -> Run | None:
    """Return the run that represents a recorded state, or else one that shows that other inputs made its outputs."""
    outs = stage.out_digests()
    writers = (run for run in index.runs() if outputs(run.data.tags) == outs)
    return find_equivalent_run(index, stage) or next(writers, None)


def purge(client: MlflowClient, runs: list[Run]) -> None:
    """Mark runs and their models as deleted, then let MLflow remove them, and all deleted models, for good."""
    from mlflow.cli import gc  # late: it imports MLflow's whole command line

    uri = client.tracking_uri
    with store_lock(uri), contextlib.redirect_stdout(io.StringIO()):
        for run in runs:
            for model in models_of(client, run):
                client.delete_logged_model(model.model_id)
            if run.info.lifecycle_stage == LifecycleStage.ACTIVE:
                client.delete_run(run.info.run_id)
        run_ids = ",".join(run.info.run_id for run in runs)
        options = ["--backend-store-uri", uri, "--tracking-uri", uri, "--run-ids", run_ids]
        gc.main(options, standalone_mode=False)


def _agrees() -> bool:
    """Ask for confirmation, if there is a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("nothing removed: not interactive; pass --yes")
        return False
    with contextlib.suppress(EOFError):
        return input("Remove all this? [y/N] ").strip().lower() in ("y", "yes")
    return False
