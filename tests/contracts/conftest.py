"""The small pipeline after its first run, for the tests that go on from there."""

import shutil
from pathlib import Path

import pytest
from projects import Project, make_small_project


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose pipeline ran once, with its results committed; to be copied, not to be changed."""
    project = make_small_project(tmp_path_factory.mktemp("finished") / "project")
    assert project.ran(project.dvc("repro")) == ["fetch", "train", "evaluate", "gradients"]
    project.commit("results")
    return project


@pytest.fixture
def project(finished: Project, tmp_path: Path) -> Project:
    """A copy of it, for a test to change. The store comes along, and is led to the copy by what first opens it."""
    shutil.copytree(finished.folder, tmp_path / "project", symlinks=True)
    return Project(tmp_path / "project")
