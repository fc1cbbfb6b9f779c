"""Where no source of MNIST answers: one line from the stage; from `gradtrail repro` a banner, and the digits."""

import json
import shutil
from pathlib import Path

import pytest
from projects import ROOT, Project, copy_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = copy_project(tmp_path / "project")
    project.set("runtime.mirrors", ["http://127.0.0.1:9/mnist"])  # where nobody listens
    project.set("runtime.openml", False)
    project.set("runtime.tracking", False)
    return project


def repro(project: Project, *options: str) -> str:
    """Run what `make repro` runs, as far as the first stage."""
    return project.gradtrail("repro", *options, "fetch", env={"MNIST_DIR": ""})


def test_the_stage_says_what_to_do_and_falls_back_to_nothing(project: Project) -> None:
    before = (project.folder / "params.yaml").read_bytes()
    output = project.dvc("repro", "fetch", env={"MNIST_DIR": ""}, status=255)
    assert "http://127.0.0.1:9/mnist" in output
    assert "set MNIST_DIR" in output
    assert "Traceback" not in output
    assert (project.folder / "params.yaml").read_bytes() == before
    assert not (project.folder / "metrics").exists()


@pytest.mark.slow
def test_make_repro_goes_on_with_the_digits_and_says_so_every_time(project: Project) -> None:
    path = project.folder / "params.yaml"
    before = path.read_text().splitlines()
    output = repro(project)
    changed = [(old, new) for old, new in zip(before, path.read_text().splitlines(), strict=True) if old != new]
    assert changed == [("  dataset: mnist", "  dataset: digits")]
    assert "No source of MNIST answered" in output
    assert json.loads((project.folder / "results/metrics/fetch.json").read_text())["dataset"] == "digits"
    again = repro(project, "--force")
    assert project.ran(again) == ["fetch"]
    assert "No source of MNIST answered" not in again
    assert "To use MNIST" in again


@pytest.mark.slow
def test_an_evaluation_that_was_not_run_is_not_reported(project: Project) -> None:
    project.set("fetch.dataset", "digits")
    metrics = project.folder / "metrics"
    metrics.mkdir()
    shutil.copy(ROOT / "results" / "metrics" / "evaluate.json", metrics)
    assert "test accuracy" not in repro(project)


def test_bad_params_are_refused_before_dvc_removes_anything(project: Project) -> None:
    (out := project.folder / "data/raw").mkdir(parents=True)
    (out / "of before").touch()
    project.set("gradients.top_fraction", 2)
    output = project.gradtrail("repro", "fetch", status=2)
    assert output == "gradtrail: params.yaml: gradients.top_fraction must be above 0 and at most 1, got 2.0\n"
    assert (out / "of before").exists()


@pytest.mark.slow
@pytest.mark.parametrize("line", ["  dataset:   'mnist'  # of my own", '  dataset: "mnist"'])
def test_the_fallback_changes_one_word_of_a_file_of_ones_own(project: Project, line: str) -> None:
    path = project.folder / "params.yaml"
    path.write_text(path.read_text().replace("  dataset: mnist", line))
    before = path.read_text()
    repro(project)
    word = line.split("#")[0].split()[1]
    assert path.read_text() == before.replace(word, "digits", 1)


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
