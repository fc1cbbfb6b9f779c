"""How a stage starts: with the code of its own folder, the project's interpreter, and params that make sense."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from projects import Project, copy_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = copy_project(tmp_path_factory.mktemp("start") / "project")
    project.set("fetch.dataset", "digits")
    project.set("runtime.tracking", False)
    for stage in ("fetch", "preprocess"):
        assert start(project, stage) == (0, "")
    return project


def start(project: Project, stage: str, **env: str) -> tuple[int, str]:
    """Run a stage as DVC would; return exit status and what it printed."""
    output = project.run("sh", "-c", f"sh pipeline/stage.sh {stage}; echo status $?", env=env, check=False)
    *lines, status = output.strip().splitlines()
    return int(status.split()[1]), "\n".join(lines)


@pytest.mark.parametrize(
    ("key", "value", "stage", "words"),
    [
        ("preprocess.validation_fraction", 1.5, "preprocess", ["preprocess.validation_fraction", "below 1", "1.5"]),
        ("preprocess.seed", "zero", "preprocess", ["preprocess.seed", "integer", "zero"]),
        ("preprocess.label_nois", 0.1, "preprocess", ["preprocess.label_nois", "no known key"]),
        ("fetch.dataset", "cifar", "fetch", ["fetch.dataset", "mnist, digits, fashion_mnist, idx", "cifar"]),
        ("train.mlp.hidden", [], "train", ["train.mlp.hidden", "at least 1"]),
        ("train.optimizer", "adamz", "train", ["train.optimizer", "'adamw'", "adamz"]),
        ("train.adamw.b1", 1.0, "train", ["train.adamw.b1", "below 1"]),
        ("train.accumulation_steps", 3, "train", ["train.accumulation_steps", "divide batch_size 128", "3"]),
        ("runtime.steps_per_call", 0, "train", ["runtime.steps_per_call", "at least 1", "0"]),
    ],
)
def test_bad_params_are_one_line_and_touch_nothing(
    project: Project, tmp_path: Path, key: str, value: object, stage: str, words: list[str]
) -> None:
    copy = Project(shutil.copytree(project.folder, tmp_path / "project"))
    before = _contents(copy.folder)
    copy.set(key, value)
    status, output = start(copy, stage)
    assert status == 2
    assert len(output.splitlines()) == 1
    assert all(word in output for word in words), output
    params = copy.folder / "params.yaml"
    assert _contents(copy.folder) == before | {params: params.read_bytes()}


def _contents(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and not {".git", "__pycache__"} & set(path.parts)]
    return {path: path.read_bytes() for path in files}


def test_a_stage_refuses_code_from_elsewhere(project: Project, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(project.folder / "src", tmp_path / "src")
    output = project.python("-m", "pipeline.fetch", env={"PYTHONPATH": str(elsewhere)}, check=False)
    assert "gradtrail was imported from" in output
    assert len(output.splitlines()) == 1


def test_the_interpreter_of_the_repository_is_found_without_activating(project: Project, tmp_path: Path) -> None:
    """As with `.venv/bin/dvc repro` in a shell whose `python` knows nothing of the project."""
    copy = Project(shutil.copytree(project.folder, tmp_path / "project"))
    (copy.folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    foreign = tmp_path / "bin"
    foreign.mkdir()
    for name in ("python", "python3"):
        (foreign / name).write_text("#!/bin/sh\nexit 1\n")
        (foreign / name).chmod(0o755)
    path = os.pathsep.join([str(foreign), "/usr/bin", "/bin"])
    assert start(copy, "fetch", PATH=path, VIRTUAL_ENV="", DVC_ROOT=str(copy.folder))[0] == 0
    (copy.folder / ".venv").unlink()
    status, output = start(copy, "fetch", PATH=path, VIRTUAL_ENV="", DVC_ROOT=str(copy.folder))
    assert status == 2
    assert "make env" in output


def test_other_versions_than_recorded_are_refused(project: Project, tmp_path: Path) -> None:
    copy = Project(shutil.copytree(project.folder, tmp_path / "project"))
    versions = copy.folder / "versions.yaml"
    versions.write_text(versions.read_text().replace("numpy:", "numpy: 1.0.0 #"))
    status, output = start(copy, "fetch")
    assert status == 2
    assert "numpy is 1.0.0" in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("size", [3000, 0])
def test_a_damaged_data_file_is_one_line(project: Project, tmp_path: Path, size: int) -> None:
    copy = Project(shutil.copytree(project.folder, tmp_path / "project"))
    images = copy.folder / "data/raw/train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:size])
    status, output = start(copy, "preprocess")
    assert status == 2
    assert "train-images-idx3-ubyte" in output
    assert len(output.splitlines()) == 1
