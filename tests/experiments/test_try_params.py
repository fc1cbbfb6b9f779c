"""`gradtrail try`: a verdict on each combination of params, and no change of the files here."""

import re
from pathlib import Path

import pytest
from projects import copy_project


@pytest.mark.slow
def test_each_combination_is_judged_and_kept_by_its_name(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project")
    for key, value in {"fetch.dataset": "digits", "train.epochs": 1, "train.mlp.hidden": [16]}.items():
        project.set(key, value)
    for changes, reason in {
        "epoch=2": "-S: params.yaml has no key 'train.epoch'; did you mean 'train.epochs'?",
        "epochs=1,ten": "train.epochs: Input should be a valid integer, got 'ten'",
        "epochs=": "-S: train.epochs has no values",
    }.items():
        assert reason in project.gradtrail("try", "-S", f"train.{changes}", status=2)
    project.dvc("repro", "evaluate")
    project.commit("evaluated")
    files = {path: path.read_bytes() for path in (project.folder / name for name in ("params.yaml", "dvc.lock"))}
    said = project.gradtrail("try", "-S", "train.epochs=1,5", "-S", "train.optimizer=adam")
    lines = [line for line in said.splitlines() if "keep it" in line]
    assert [line.partition(":")[0] for line in lines] == ["epochs=1, optimizer=adam", "epochs=5, optimizer=adam"]
    assert re.search(r"test accuracy \d+\.\d\d%, workspace \d+\.\d\d%: better, 95 % \+.* points, [\d.]+ s", lines[1])
    assert {path: path.read_bytes() for path in files} == files
    name = lines[1].rpartition(" ")[2]
    assert name == "epochs-5-optimizer-adam"
    project.dvc("exp", "apply", name, status=255)  # it is applied, but stages after `evaluate` never ran here
    assert "epochs: 5" in (project.folder / "params.yaml").read_text()
    project.set("train.epochs", 3)  # which was not evaluated
    said = project.gradtrail("try", "-S", "train.epochs=1")
    assert "results/evaluate is of other params or data" in said
    assert "workspace has no evaluation to compare with" in said
