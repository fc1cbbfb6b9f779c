"""An artifact is downloaded; one that a run has not is None, and a store that fails is no answer."""

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from gradtrail.tracking.mlflow.artifacts import download


@pytest.fixture
def client(created_store: Any) -> MlflowClient:
    return MlflowClient(f"sqlite:///{created_store.folder}/mlflow.db")


def test_an_artifact_is_downloaded_and_what_a_run_has_not_is_none(client: MlflowClient, tmp_path: Path) -> None:
    run_id = client.create_run("0").info.run_id
    client.log_text(run_id, "words", "results/a.txt")
    found = download(client, run_id, "results/a.txt", tmp_path)
    assert found is not None
    assert found.read_text() == "words"
    for path in ("results/b.txt", "a.txt", "none/a.txt"):
        assert download(client, run_id, path, tmp_path) is None


def test_a_store_that_fails_is_no_missing_artifact(client: MlflowClient, tmp_path: Path) -> None:
    with pytest.raises(MlflowException, match="not found"):
        download(client, "0" * 32, "a.txt", tmp_path)
