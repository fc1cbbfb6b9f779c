"""A store for the tests of this folder, which takes seconds to create."""

from pathlib import Path

import pytest
from mlflow import MlflowClient
from registered import created_store, enter_store


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return created_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def client(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """The client of a store of its own, in whose folder the test runs."""
    return enter_store(empty_store, tmp_path, monkeypatch)
