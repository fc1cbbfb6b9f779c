"""The store of the small project, for tests that sync in their own process."""

import pytest
from mlflow import MlflowClient
from projects import Project

from gradtrail.tracking.store import open_store


@pytest.fixture
def client(project: Project, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """The store of the project, which is the working folder."""
    monkeypatch.chdir(project.folder)
    return open_store()
