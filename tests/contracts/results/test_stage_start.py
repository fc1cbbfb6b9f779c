"""How a stage starts: with the code of its own folder, the project's interpreter, and params that make sense."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from projects import Project, finished_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = finished_project().copy(tmp_path / "project")
    project.set("runtime.tracking", False)
    return project


def start(project: Project, stage: str, *, status: int, **env: str) -> str:
    """Run a stage as DVC would, which ends with this exit status; return what it printed."""
    return project.run("sh", "pipeline/stage.sh", stage, env=env, status=status)


def test_bad_params_are_one_line_and_touch_nothing(project: Project) -> None:
    before = _contents(project.folder)
    project.set("train.accumulation_steps", 3)
    output = start(project, "train", status=2)
    assert len(output.splitlines()) == 1
    assert all(word in output for word in ("train.accumulation_steps", "divide batch_size 128", "3")), output
    params = project.folder / "params.yaml"
    assert _contents(project.folder) == before | {params: params.read_bytes()}


def _contents(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and not {".git", "__pycache__"} & set(path.parts)]
    return {path: path.read_bytes() for path in files}


def test_stage_refuses_code_from_elsewhere(project: Project, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(project.folder / "src", tmp_path / "src")
    output = project.python("-m", "pipeline.fetch", env={"PYTHONPATH": str(elsewhere)}, status=2)
    assert "gradtrail was imported from" in output
    assert len(output.splitlines()) == 1


def test_interpreter_of_repository_is_used_without_activation(project: Project, tmp_path: Path) -> None:
    """As with `.venv/bin/dvc repro` in a shell whose `python` knows nothing of the project."""
    (project.folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    foreign = tmp_path / "bin"
    foreign.mkdir()
    for name in ("python", "python3"):
        (foreign / name).write_text("#!/bin/sh\nexit 1\n")
        (foreign / name).chmod(0o755)
    path = os.pathsep.join([str(foreign), "/usr/bin", "/bin"])
    env = {"PATH": path, "VIRTUAL_ENV": "", "DVC_ROOT": str(project.folder)}
    start(project, "fetch", status=0, **env)
    (project.folder / ".venv").unlink()
    assert "make env" in start(project, "fetch", status=2, **env)


def test_other_versions_than_recorded_are_refused(project: Project) -> None:
    versions = project.folder / "pipeline/versions.yaml"
    versions.write_text(versions.read_text().replace("numpy:", "numpy: 1.0.0 #"))
    output = start(project, "fetch", status=2)
    assert "numpy 1.0.0" in output
    assert len(output.splitlines()) == 1
