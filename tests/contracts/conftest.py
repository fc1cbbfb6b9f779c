"""The small pipeline after its first run, for the tests that go on from there."""

from pathlib import Path

import pytest
from projects import Project
from small_project import finished_small_project


@pytest.fixture
def finished() -> Project:
    """A project whose pipeline ran once, with its results committed; to be copied, not to be changed."""
    return finished_small_project()


@pytest.fixture
def project(finished: Project, tmp_path: Path) -> Project:
    """A copy of it, for a test to change. The store comes along, and is relocated by what first opens it."""
    return finished.copy(tmp_path / "project")


@pytest.fixture(autouse=True)
def _store_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the store that an earlier test of this process opened: MLflow puts its address into the environment."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
