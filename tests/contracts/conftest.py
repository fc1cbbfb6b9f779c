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
