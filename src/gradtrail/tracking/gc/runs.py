"""Runs of MLflow's store that belong to no recorded state.

A run is garbage if sync would not rebuild it. Open runs are kept; so are those that have only just ended, as DVC may
not have recorded them yet, those whose training can resume from a checkpoint, and the parents of runs that are kept.
Such a run is deleted as in MLflow's UI; the function behind `mlflow gc` then removes deleted runs and models for good.
Only in this repository's own database: on a server, or in a database elsewhere, runs may belong to other clones.
"""

import contextlib
import functools
import io
import time
from collections.abc import Collection, Iterator

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.tracking import _get_store

from gradtrail.tracking.gc.files import PREFIX, Garbage, size_of
from gradtrail.tracking.lineage.recorded import RecordedStates, consistent_stages, last_stage
from gradtrail.tracking.mlflow.client import store_lock
from gradtrail.tracking.mlflow.links import PARENT
from gradtrail.tracking.mlflow.models import models_of, registered_models
from gradtrail.tracking.mlflow.relocate import local_path
from gradtrail.tracking.mlflow.search import RunIndex, deleted_runs, find_equivalent_run
from gradtrail.tracking.mlflow.stored_run import REPLACED
from gradtrail.tracking.mlflow.tags import is_alive, is_of_this_host

SETTLING_SECONDS = 120  # longest time from a run's end until DVC has recorded the state


def needed_runs(client: MlflowClient, recorded: RecordedStates, index: RunIndex) -> set[str]:
    """Return the ids of the runs that represent recorded states, or whose model has a version in MLflow's registry."""
    states, run_ids = set[str](), set[str]()
    for stage in (stage for snapshot in recorded.snapshots for stage in consistent_stages(snapshot)):
        states.add(stage.state)
        if run := find_equivalent_run(index, stage):
            run_ids.add(run.info.run_id)
    run_ids |= {run.info.run_id for run in index.runs() if run.data.tags.get("state") in states}
    states |= {index[run_id].data.tags["state"] for run_id in run_ids}
    for stage in map(last_stage, recorded.only_in_run_cache(states.__contains__)):
        if run := find_equivalent_run(index, stage):
            run_ids.add(run.info.run_id)
    return run_ids | {name for name in registered_models(client) if name in index}


def unneeded_garbage(
    client: MlflowClient, index: RunIndex, needed: Collection[str], resumable: Collection[str]
) -> Iterator[Garbage]:
    """Yield the runs that belong to no recorded state, the newest first.

    Args:
        client: Client of the store.
        index: Index of all runs.
        needed: Ids of the runs that represent recorded states or are needed by the registry.
        resumable: First digits of the keys of states whose training can resume.
    """
    own_runs = [run for run in index.runs() if "state" in run.data.tags]
    remaining = {run.info.run_id for run in own_runs if run.info.run_id in needed or _must_stay(run, resumable)}
    remaining |= {index[run_id].data.tags.get(PARENT, "") for run_id in remaining}
    for run in own_runs:
        if run.info.run_id not in remaining:
            ending = {"KILLED": "killed; ", "FAILED": "failed; "}.get(run.info.status, "")
            yield _garbage(client, run, f"{ending}its state is not recorded")


def deleted_garbage(client: MlflowClient) -> Iterator[Garbage]:
    """Yield the runs that sync or a person deleted, and that MLflow keeps until they are purged."""
    for run in _purgeable_runs(client):
        is_replaced = REPLACED in run.data.tags
        yield _garbage(client, run, "another run has its place" if is_replaced else "deleted in MLflow")


def purge(client: MlflowClient) -> None:
    """Remove deleted runs and models with their artifacts for good, as `mlflow gc` does.

    Deleted experiments stay, and so do models with a version in the registry, with their runs.
    """
    from mlflow.cli import _gc_tracking_resources  # late: it imports MLflow's whole command line

    store, registered = _get_store(client.tracking_uri), registered_models(client)
    with store_lock(client.tracking_uri), contextlib.redirect_stdout(io.StringIO()):
        _gc_tracking_resources(
            store,
            run_ids=[run.info.run_id for run in _purgeable_runs(client)],
            experiment_ids=None,
            logged_model_ids=[model for model in store._get_deleted_logged_models() if model not in registered],
            older_than=None,
            time_delta=0,
            skip_experiments=True,
            skip_logged_models=False,
        )


def _purgeable_runs(client: MlflowClient) -> list[Run]:
    registered = registered_models(client)
    return [
        run
        for run in deleted_runs(client)
        if not (_is_open(run) or run.info.run_id in registered)
        and not any(model.model_id in registered for model in models_of(client, run))
    ]


def _garbage(client: MlflowClient, run: Run, why: str) -> Garbage:
    locations = [run.info.artifact_uri, *(model.artifact_location for model in models_of(client, run))]
    return Garbage(
        category="run",
        name=f"{run.info.run_name} ({run.info.run_id[:8]})",
        why=why,
        size_bytes=sum(size_of(path) for location in locations if (path := local_path(location))),
        remove=functools.partial(_delete, client, run),
    )


def _delete(client: MlflowClient, listed: Run) -> None:
    """Delete a run and its models, to be purged; one that a process has opened since it was listed stays."""
    with store_lock(client.tracking_uri):
        run = client.get_run(listed.info.run_id)
        if _is_open(run) or run.info.end_time != listed.info.end_time:
            return
        for model in models_of(client, run):
            client.delete_logged_model(model.model_id)
        if run.info.lifecycle_stage == "active":
            client.delete_run(run.info.run_id)


def _must_stay(run: Run, resumable: Collection[str]) -> bool:
    """Whether a run whose state is not recorded is kept for now."""
    if run.info.status == "FINISHED":
        return time.time() - run.info.end_time / 1000 < SETTLING_SECONDS
    return _is_open(run) or run.data.tags["state"][:PREFIX] in resumable


def _is_open(run: Run) -> bool:
    """Whether a process may work on a run: here, or, unless the run was deleted, on another host."""
    is_elsewhere = run.info.lifecycle_stage == "active" and not is_of_this_host(run.data.tags)
    return run.info.status == "RUNNING" and (is_elsewhere or is_alive(run.data.tags))
