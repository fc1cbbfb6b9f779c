"""One store for many processes: created once, and a request that conflicts with another one is repeated."""

import contextlib
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, INTERNAL_ERROR

from gradtrail.support.errors import UserError
from gradtrail.tracking.mlflow.client import StoreClient, experiment_id, open_store


@pytest.mark.slow
def test_processes_that_create_the_store_at_once_agree(created_store: Any) -> None:
    folder = created_store.folder
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as store:
        query = "select experiment_id, artifact_location from experiments where name = 'models'"
        ((experiment, location),) = store.execute(query).fetchall()
    assert created_store.processes == [(0, f"{experiment}\n".encode())] * 2
    assert location == (folder / "mlruns").as_uri()


@pytest.mark.parametrize(
    ("code", "refusals", "calls"),
    [(BAD_REQUEST, 0, 1), (BAD_REQUEST, 2, 3), (BAD_REQUEST, 9, 3), (INTERNAL_ERROR, 1, 1)],
)
def test_a_request_that_conflicts_with_another_is_repeated(
    code: int, refusals: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = StoreClient("http://127.0.0.1:9")
    made: list[str] = []

    def log_batch(run_id: str, metrics: Any, params: Any, tags: Any, synchronous: bool) -> None:
        made.append(run_id)
        if len(made) <= refusals:
            raise MlflowException("conflict", error_code=code)

    monkeypatch.setattr(client._tracking_client, "log_batch", log_batch)
    stands = contextlib.nullcontext() if refusals < calls else pytest.raises(MlflowException, match="conflict")
    with stands:
        client.log_batch("run", tags=[])
    assert made == ["run"] * calls


@pytest.fixture
def database(created_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the store's database, which `open_store` opens."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Path(shutil.copy(created_store.folder / "mlflow.db", tmp_path))


@pytest.mark.parametrize(
    ("schema", "line"),
    [
        (
            "451aebb31d03",
            r"made by an older MLflow than .* \(451aebb31d03, not \w+\); back it up, then run `mlflow db upgrade ",
        ),
        ("ffffffffffff", r"made by a newer MLflow than .* \(ffffffffffff, not \w+\); install that MLflow to open it$"),
    ],
)
def test_database_of_another_mlflow_is_refused_in_one_line(schema: str, line: str, database: Path) -> None:
    with contextlib.closing(sqlite3.connect(database)) as store, store:
        store.execute("update alembic_version set version_num = ?", (schema,))
    with pytest.raises(UserError, match=f"^{re.escape(str(database))}: {line}"):
        open_store()


@pytest.fixture
def client(database: Path) -> MlflowClient:
    return open_store()


def test_deleted_experiment_is_named_with_the_remedy(client: MlflowClient) -> None:
    experiment = experiment_id(client, "models")
    client.delete_experiment(experiment)
    remedy = f"`mlflow experiments restore --experiment-id {experiment}` restores it with its runs"
    with pytest.raises(UserError, match=f"^MLflow's experiment 'models' was deleted; {remedy}$"):
        experiment_id(client, "models")
    client.restore_experiment(experiment)
    assert experiment_id(client, "models") == experiment


def test_renamed_experiment_is_found(client: MlflowClient) -> None:
    experiment = experiment_id(client, "models")
    client.rename_experiment(experiment, "trainings of 2026")
    assert experiment_id(client, "models") == experiment
