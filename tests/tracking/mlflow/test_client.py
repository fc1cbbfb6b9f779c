"""One store for many processes: created once, and a request that conflicts with another one is repeated."""

import contextlib
import sqlite3
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, INTERNAL_ERROR

from gradtrail.tracking.mlflow.client import StoreClient


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
