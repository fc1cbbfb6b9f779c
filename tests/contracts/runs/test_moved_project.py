"""A project that was moved or copied: runs and artifacts open in the new place, and nothing names the old one."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from projects import Project

from gradtrail.stages.common.digests import digest

NAME = "neuer Ordner ü"
DOWNLOAD = """
from pathlib import Path
from gradtrail.stages.common.digests import digest
from gradtrail.tracking.mlflow.client import open_store
client = open_store()
experiments = [found.experiment_id for found in client.search_experiments()]
for run in client.search_runs(experiments):
    print(run.info.run_id, digest(Path(client.download_artifacts(run.info.run_id, ""))))
"""
LOCATIONS = [
    "select artifact_location from experiments",
    "select artifact_uri from runs",
    "select artifact_location from logged_models",
    "select source from model_versions",
    "select storage_location from model_versions",
    "select value from trace_tags",
]


def locations(project: Project) -> list[str]:
    with closing(sqlite3.connect(project.folder / "mlflow.db")) as store:
        return [location for query in LOCATIONS for (location,) in store.execute(query)]


def downloads(project: Project) -> dict[str, str]:
    """Return the digest of all artifacts of each run, as MLflow gives them."""
    lines = project.python("-c", DOWNLOAD, env={"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}).splitlines()
    return dict(line.split() for line in lines)


def quoted(folder: Path) -> tuple[str, str]:
    """Return how locations in a folder begin."""
    return f"{folder}/mlruns", f"{folder.as_uri()}/mlruns"


@pytest.mark.slow
def test_moved_project_works_in_its_new_place(finished: Project, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    project = Project(shutil.copytree(finished.folder, tmp_path / "old/project"))
    project.sync()
    before = downloads(project)
    assert len(before) == 4
    (tmp_path / NAME).mkdir()
    moved = Project(Path(shutil.move(project.folder, tmp_path / NAME)))
    assert moved.sync().splitlines() == [
        f"moved or copied from {project.folder}: the artifacts of 4 runs in MLflow now name {moved.folder}",
        "4 runs present",
    ]
    assert all(location.startswith(quoted(moved.folder)) for location in locations(moved))
    assert downloads(moved) == before
    assert moved.sync() == "4 runs present\n"
    assert moved.ran(moved.dvc("repro")) == []
    moved.set("evaluate.calibration_bins", 7)
    assert moved.ran(moved.dvc("repro")) == ["evaluate"]
    assert len(downloads(moved)) == 5
    assert all(location.startswith(quoted(moved.folder)) for location in locations(moved))
    assert not (tmp_path / "old/project").exists()


@pytest.mark.slow
def test_copy_is_relocated_and_the_original_is_unchanged(finished: Project, tmp_path: Path) -> None:
    project = Project(shutil.copytree(finished.folder, tmp_path / "project"))
    project.sync()
    before = digest(project.folder / "mlflow.db"), digest(project.folder / "mlruns")
    copied = Project(shutil.copytree(project.folder, tmp_path / "copy", symlinks=True))
    copied.set("evaluate.calibration_bins", 7)
    output = copied.dvc("repro")  # a stage leads it as a sync does
    assert f"moved or copied from {project.folder}" in output
    assert copied.ran(output) == ["evaluate"]
    assert all(location.startswith(quoted(copied.folder)) for location in locations(copied))
    assert (digest(project.folder / "mlflow.db"), digest(project.folder / "mlruns")) == before
    assert project.sync() == "4 runs present\n"


@pytest.mark.nightly
def test_a_worktree_has_a_store_of_its_own_and_shares_commits_and_cache(finished: Project, tmp_path: Path) -> None:
    project = finished.copy(tmp_path / "project")
    project.sync()
    project.git("worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    side = Project(tmp_path / "side")
    side.dvc("cache", "dir", "--local", str(project.folder / ".dvc/cache"))
    assert "rebuilt: fetch, train, evaluate, gradients" in side.sync()
    assert side.ran(side.dvc("repro")) == []
    side.set("train.adamw.learning_rate", 0.5)
    assert side.ran(side.dvc("repro")) == ["train", "evaluate", "gradients"]
    side.commit("another learning rate")
    assert side.sync() == "7 runs present\n"
    side.dvc("exp", "run", "-S", "evaluate.calibration_bins=7")
    assert side.sync() == "8 runs present\n"
    assert "rebuilt: train, evaluate (2), gradients" in project.sync()
    for repository in (project, side):
        assert "nothing to remove" in repository.gradtrail("gc")
        assert {run["status"] for run in repository.runs()} == {"FINISHED"}
        assert {run["artifacts"].is_relative_to(repository.folder / "mlruns") for run in repository.runs()} == {True}
    assert {run["tags"]["state"] for run in project.runs()} == {run["tags"]["state"] for run in side.runs()}
