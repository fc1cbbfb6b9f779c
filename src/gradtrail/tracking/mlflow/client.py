"""MLflow's store: `mlflow.db` and `mlruns/` in the repository's root, or what `MLFLOW_TRACKING_URI` names.

MLflow's own defaults, so that a bare `mlflow ui` in the root shows everything. Created once, under a lock: two
processes that create the database at the same time crash. Artifacts lie in `mlruns/` beside the database.
"""

import contextlib
import functools
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from filelock import FileLock

from gradtrail.stages.common.files import atomic_file
from gradtrail.support.errors import UserError
from gradtrail.support.paths import SQLITE, database_path, private_folder, store_uri
from gradtrail.tracking.mlflow.relocate import is_moved, relocate_artifacts

# Unless the person says otherwise, MLflow neither phones home nor waits minutes for a dead server, nor shows a bar for
# each file. Read on import. A slow server gets the time it needs for a request; what a stage waits in all is limited
# where it waits.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines a row, of a server's alone

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException

for _name in ("mlflow.store", "mlflow.system_metrics", "urllib3.connectionpool"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # faults reach us as exceptions, and are told once
logging.getLogger("mlflow.pyfunc").setLevel(logging.WARNING)  # a line for each model that is logged

_CROSSED = 2  # times that others may cross a request
P = ParamSpec("P")
T = TypeVar("T")
_KIND = {"mlflow.experimentKind": "custom_model_development"}  # which of its two faces the UI shows
_EXPERIMENT_TAGS = {
    "data": _KIND | {"mlflow.note.content": "One row for each state of the data: fetched, and split."},
    "models": _KIND
    | {"mlflow.note.content": "One row for each trained state; evaluation, gradients, profile and report below it."},
}


def _asked_again(request: Callable[P, T]) -> Callable[P, T]:
    """Return a request that is made again where another process crossed it."""

    @functools.wraps(request)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(_CROSSED):
            try:
                return request(*args, **kwargs)
            except MlflowException as error:
                if error.error_code != "BAD_REQUEST":
                    raise
        return request(*args, **kwargs)

    return made


class StoreClient(MlflowClient):
    """A client of a store that others write to as well.

    Two clones that open one row on a server at the same moment may both insert the same tag or data set: the database
    refuses one, and the server says that the request was bad. Asked again, it finds what is there.
    """

    log_batch = _asked_again(MlflowClient.log_batch)
    log_inputs = _asked_again(MlflowClient.log_inputs)
    log_outputs = _asked_again(MlflowClient.log_outputs)
    set_tag = _asked_again(MlflowClient.set_tag)


def open_store() -> MlflowClient:
    """Return a client of the store, which is created if need be, and led here if it was moved or copied."""
    uri = store_uri()
    if uri.startswith(SQLITE):
        _create_database(uri)
    if is_moved(uri):
        with store_lock(uri):
            relocate_artifacts(uri)
    mlflow.set_tracking_uri(uri)
    return StoreClient(uri)


def store_lock(uri: str) -> FileLock:
    """Return the lock of a store: beside a database that several clones may share, else in this repository.

    One object a file in a process, so that who holds it may take it again.
    """
    path = database_path(uri)
    file = path.with_name(f".{path.name}.lock") if uri.startswith(SQLITE) else private_folder() / "store.lock"
    return FileLock(file, is_singleton=True)


def experiment_id(client: MlflowClient, name: str) -> str:
    """Return the id of an experiment, which is created if need be, with its artifacts beside the database."""
    found = client.get_experiment_by_name(name)
    if found is None:
        with store_lock(client.tracking_uri):
            found = client.get_experiment_by_name(name) or _create_experiment(client, name)
    return str(found.experiment_id)


def _create_experiment(client: MlflowClient, name: str) -> Experiment:
    uri = client.tracking_uri
    location = _artifact_folder(uri).as_uri() if uri.startswith(SQLITE) else None
    # A clone on another machine that shares the server may be faster.
    with contextlib.suppress(MlflowException):
        client.create_experiment(name, artifact_location=location, tags=_EXPERIMENT_TAGS[name])
    found = client.get_experiment_by_name(name)
    if found is None:
        raise UserError(f"MLflow's store has no experiment {name}, and none can be created")
    return found


def _create_database(uri: str) -> None:
    """Make the database beside its place and rename it: nobody meets one that is half made."""
    path = database_path(uri)
    if _is_complete(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with store_lock(uri):
        if _is_complete(path):
            return
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        with atomic_file(path) as beside:
            SqlAlchemyStore(f"{SQLITE}{beside}", str(_artifact_folder(uri))).engine.dispose()


def _artifact_folder(uri: str) -> Path:
    """Return the folder of the artifacts: beside the database, as several clones may share one."""
    return database_path(uri).resolve().parent / "mlruns"


def _is_complete(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("select name from sqlite_master where name = 'alembic_version'").fetchall()
    return bool(tables)
