"""One store for many processes: created once, and a request that conflicts with another one is repeated."""

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, INTERNAL_ERROR

from gradtrail.tracking.mlflow.client import StoreClient

OPEN = (
    "from gradtrail.tracking.mlflow.client import experiment_id, open_store; "
    "print(experiment_id(open_store(), 'models'))"
)


def test_processes_that_create_the_store_at_once_agree(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_TRACKING")}
    env |= {"DVC_ROOT": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", OPEN], env=env, stdout=subprocess.PIPE) for _ in range(2)]
    answers = {process.communicate()[0] for process in started}
    assert [process.returncode for process in started] == [0, 0]
    assert len(answers) == 1
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("select count(*) from experiments where name = 'models'").fetchone() == (1,)
        (location,) = store.execute("select artifact_location from experiments where name = 'models'").fetchone()
    assert location == (tmp_path / "mlruns").as_uri()


@pytest.mark.parametrize(
    ("code", "refusals", "calls"),
    [(BAD_REQUEST, 0, 1), (BAD_REQUEST, 2, 3), (BAD_REQUEST, 9, 3), (INTERNAL_ERROR, 1, 1)],
)
def test_a_request_that_conflicts_with_another_is_repeated(
    code: int, refusals: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = StoreClient("http://127.0.0.1:9")
    request = Mock(side_effect=[*[MlflowException("conflict", error_code=code)] * refusals, None])
    monkeypatch.setattr(client._tracking_client, "log_batch", request)
    stands = contextlib.nullcontext() if refusals < calls else pytest.raises(MlflowException, match="conflict")
    with stands:
        client.log_batch("run", tags=[])
    assert request.call_count == calls
