"""MLflow's store: `mlflow.db` and `mlruns/` in the repository's root, or the one that `MLFLOW_TRACKING_URI` names.

These are MLflow's own defaults, so that a bare `mlflow ui` in the root shows everything. The database is created once,
under a lock: two processes that create it at the same time crash. Artifacts are in `mlruns/` next to the database.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from filelock import FileLock

from gradtrail.stages.common.files import atomic_file
from gradtrail.support.errors import UserError
from gradtrail.support.paths import SQLITE, database_path, private_folder, store_uri
from gradtrail.tracking.relocate import former_folders, relocate_artifacts
from gradtrail.tracking.tags import EXPERIMENT, EXPERIMENT_KIND, experiment_name

# Defaults, which MLflow reads on import: no telemetry, no minutes of retries for a dead server, no progress bar for
# each file. A slow server gets the time that it needs for one request; the total time that a stage waits has a limit.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines for each run on a server

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Experiment, LifecycleStage, ViewType
from mlflow.exceptions import MlflowException

for _name in ("mlflow.store", "mlflow.system_metrics", "urllib3.connectionpool"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # faults are raised too, and reported once
logging.getLogger("mlflow.pyfunc").setLevel(logging.WARNING)  # a line for each model that is logged

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _retried(request: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a request that is repeated once if it conflicts with another process."""

    def retried(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return request(*args, **kwargs)
        except MlflowException as error:
            if error.error_code != "BAD_REQUEST":
                raise
            return request(*args, **kwargs)

    return retried


class StoreClient(MlflowClient):
    """A client of a store that others write to as well.

    Two clones that open one run on a server at the same moment may both insert the same tag or data set: the database
    rejects one, and the server answers BAD_REQUEST. The second time, the request finds the record.
    """

    log_batch = _retried(MlflowClient.log_batch)
    log_inputs = _retried(MlflowClient.log_inputs)
    log_outputs = _retried(MlflowClient.log_outputs)
    set_tag = _retried(MlflowClient.set_tag)


def open_store() -> MlflowClient:
    """Return a client of the store, which is created if needed; relocate its artifacts if the repository was moved."""
    uri = store_uri()
    path = database_path(uri)
    if uri.startswith(SQLITE) and (not _has_content(path) or former_folders(uri)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with store_lock(uri):
            if not _has_content(path):
                from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

                with atomic_file(path) as temporary:  # so that no process opens an incomplete one
                    SqlAlchemyStore(f"{SQLITE}{temporary}", str(_artifact_folder(uri))).engine.dispose()
            relocate_artifacts(uri)
    mlflow.set_tracking_uri(uri)
    try:
        return StoreClient(uri)
    except MlflowException as error:
        if "found version" not in str(error):  # MLflow's words for the schema of a database
            raise
        raise UserError(
            f"{path}: made by another MLflow than {mlflow.__version__}; install that one, or, if it is "
            f"older, back the file up and run `mlflow db upgrade {uri}`"
        ) from None


def store_lock(uri: str) -> FileLock:
    """Return the lock of a store: next to a database, which several clones may share, else in this repository."""
    path = database_path(uri)
    file = path.with_name(f".{path.name}.lock") if uri.startswith(SQLITE) else private_folder() / "store.lock"
    return FileLock(file, is_singleton=True)  # its holder may acquire it again


def experiment_id(client: MlflowClient, kind: str) -> str:
    """Return the id of this project's experiment for `data` or `models`, which is created if needed.

    It is found by the tag that names it, as people rename experiments. UserError if it was deleted, or if an experiment
    of somebody else has its name.
    """
    name = experiment_name(kind, client.tracking_uri)
    experiment = _find_experiment(client, name) or _create_experiment(client, name)
    if experiment.lifecycle_stage == LifecycleStage.DELETED:
        restore = f"mlflow experiments restore --experiment-id {experiment.experiment_id}"
        raise UserError(f"MLflow's experiment {name!r} was deleted; `{restore}` restores it with its runs")
    return str(experiment.experiment_id)


def _find_experiment(client: MlflowClient, name: str) -> Experiment | None:
    """Return the experiment that was created with a name, renamed or not; a deleted one only if there is no other."""
    tagged = client.search_experiments(ViewType.ALL, filter_string=f"tags.`{EXPERIMENT}` = '{name}'")
    return min(tagged, key=lambda one: (one.lifecycle_stage, one.creation_time or 0), default=None)


def _create_experiment(client: MlflowClient, name: str) -> Experiment:
    uri = client.tracking_uri
    location = _artifact_folder(uri).as_uri() if uri.startswith(SQLITE) else None
    tags = {EXPERIMENT_KIND: "custom_model_development", EXPERIMENT: name}
    try:
        return client.get_experiment(client.create_experiment(name, location, tags))
    except MlflowException as error:
        if experiment := _find_experiment(client, name):  # another process has created it meanwhile
            return experiment
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        other = "`runtime.experiment` in params.yaml gives this project's experiments other names"
        raise UserError(f"MLflow's experiment {name!r} is not of this project; {other}") from None


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0  # SQLite makes an empty file for whoever opens it


def _artifact_folder(uri: str) -> Path:
    """Return the folder of the artifacts: next to the database, which several clones may share."""
    return database_path(uri).resolve().parent / "mlruns"
