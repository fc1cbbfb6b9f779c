"""Without a source of MNIST: one line from the stage; from `gradtrail repro` a banner, and the digits."""

import json
import shutil
from pathlib import Path

import pytest
from projects import Project, copy_project

from gradtrail.stages.common.pipeline_file import read_pipeline


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = copy_project(tmp_path / "project")
    nobody_listens = ["http://127.0.0.1:9/mnist"]
    project.change({"runtime.mirrors": nobody_listens, "runtime.openml": False, "runtime.tracking": False})
    return project


def repro(project: Project, *options: str) -> str:
    """Run what `make repro` runs, as far as the first stage."""
    return project.gradtrail("repro", *options, "fetch", env={"MNIST_DIR": ""})


def test_stage_without_source_advises_and_changes_nothing(project: Project) -> None:
    before = (project.folder / "params.yaml").read_bytes()
    outs = [project.folder / out for out in read_pipeline(project.folder / "dvc.yaml")["fetch"].outs]
    output = project.dvc("repro", "fetch", env={"MNIST_DIR": ""}, status=255)
    assert "http://127.0.0.1:9/mnist" in output
    assert "set MNIST_DIR" in output
    assert "Traceback" not in output
    assert (project.folder / "params.yaml").read_bytes() == before
    assert not [out for out in outs if out.exists()]


@pytest.mark.slow
def test_make_repro_continues_with_digits_and_says_so(project: Project) -> None:
    path = project.folder / "params.yaml"
    before = path.read_text().splitlines()
    output = repro(project)
    changed = [(old, new) for old, new in zip(before, path.read_text().splitlines(), strict=True) if old != new]
    assert [(old.partition("#")[0].strip(), new.partition("#")[0].strip()) for old, new in changed] == [
        ("dataset: mnist", "dataset: digits")
    ]
    assert {old.partition("#")[2] for old, _ in changed} == {new.partition("#")[2] for _, new in changed}
    assert "No source of MNIST answered" in output
    assert json.loads((project.folder / "results/metrics/fetch.json").read_text())["dataset"] == "digits"
    again = repro(project, "--force")
    assert project.ran(again) == ["fetch"]
    assert "No source of MNIST answered" not in again
    assert "To use MNIST" in again


@pytest.mark.slow
def test_without_git_and_after_git_init(project: Project) -> None:
    for name in (".git", ".dvc/tmp", ".dvc/config.local"):
        shutil.rmtree(project.folder / name, ignore_errors=True)
    project.set("fetch.dataset", "digits")
    assert project.ran(repro(project)) == ["fetch"]
    assert "no_scm" in (project.folder / ".dvc/config.local").read_text()
    project.git("init", "-q")
    assert project.ran(repro(project)) == []
    assert "no_scm" not in (project.folder / ".dvc/config.local").read_text()
