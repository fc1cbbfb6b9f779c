"""MLflow's store: `mlflow.db` and `mlruns/` in the repository's root, or what `MLFLOW_TRACKING_URI` names.

MLflow's own defaults, so that a bare `mlflow ui` in the root shows everything. Created once, under a lock: two
processes that create the database at the same time crash.
"""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from filelock import FileLock

from gradtrail.io.workspace import private_folder, root

# Unless the person says otherwise, MLflow neither phones home nor waits minutes for a dead server. Read on import.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "4")

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

_KIND = {"mlflow.experimentKind": "custom_model_development"}  # which of its two faces the UI shows
_EXPERIMENT_TAGS = {
    "data": _KIND | {"mlflow.note.content": "One row for each state of the data: fetched, and split."},
    "models": _KIND
    | {"mlflow.note.content": "One row for each trained state; evaluation, gradients and profile below it."},
}


def open_store() -> MlflowClient:
    """Return a client of the store, which is created if need be."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root() / 'mlflow.db'}"
    if uri.startswith("sqlite:///"):
        _create_database(Path(uri.removeprefix("sqlite:///")))
    mlflow.set_tracking_uri(uri)
    return MlflowClient(uri)


def experiment_id(client: MlflowClient, name: str) -> str:
    """Return the id of an experiment, which is created if need be, with its artifacts in the root's `mlruns/`."""
    with FileLock(private_folder() / "experiments.lock"):
        found = client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        local = os.environ.get("MLFLOW_TRACKING_URI", "sqlite").startswith("sqlite")
        location = (root() / "mlruns").as_uri() if local else None
        try:
            return client.create_experiment(name, artifact_location=location, tags=_EXPERIMENT_TAGS[name])
        except MlflowException:  # another clone that shares the server was faster
            return str(client.get_experiment_by_name(name).experiment_id)


def _create_database(path: Path) -> None:
    """Make the database beside its place and rename it: nobody meets one that is half made."""
    with FileLock(private_folder() / "store.lock"):
        if _is_complete(path):
            return
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        beside = path.with_name(f".{path.name}.new")
        beside.unlink(missing_ok=True)
        SqlAlchemyStore(f"sqlite:///{beside}", str(root() / "mlruns")).engine.dispose()
        beside.replace(path)


def _is_complete(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("select name from sqlite_master where name = 'alembic_version'").fetchall()
    return bool(tables)
