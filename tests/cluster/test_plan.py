"""Experiments have the same name if and only if they are the same; and the states that they share."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from projects import ROOT
from ruamel.yaml import YAML

from gradtrail.cluster.plan import RequestedExperiment, plan_experiments
from gradtrail.cluster.request import Experiment
from gradtrail.stages.common.pipeline_file import live_entry, read_pipeline

COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's files as far as a plan reads them; its lock without the code that it names."""
    (tmp_path / "pipeline").mkdir()
    for name in ("dvc.yaml", "params.yaml", "pipeline/versions.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(changes: dict[str, Any], commit: str = COMMIT, stage: str = "evaluate") -> Experiment:
    (experiment,) = plan_experiments([RequestedExperiment("a label", changes, stage)], commit)
    return experiment


def test_name_depends_on_commit_stage_and_params() -> None:
    one = plan({"train.seed": 1})
    assert one.name.startswith("gradtrail-")
    assert plan({"train.seed": 1}).name == one.name
    assert plan({"train.seed": 2}).name != one.name
    assert plan({"train.seed": 1}, commit="b" * 40).name != one.name
    assert plan({"train.seed": 1}, stage="gradients").name != one.name


def test_name_ignores_params_that_its_stages_do_not_read() -> None:
    assert plan({"train.seed": 1, "gradients.num_largest": 7}).name == plan({"train.seed": 1}).name


def test_repeated_experiment_is_planned_once() -> None:
    requested = [RequestedExperiment(label, {"train.seed": 1}, "evaluate") for label in ("one", "again")]
    (experiment,) = plan_experiments(requested, COMMIT)
    assert experiment.label == "one"


def test_experiments_share_the_states_before_their_first_difference() -> None:
    one, other = plan({"evaluate.calibration_bins": 5}), plan({"evaluate.calibration_bins": 7})
    assert one.name != other.name
    assert one.shared == other.shared
    assert len(one.shared) == 3, "fetch, preprocess and train, none of which a lock has"
    third = plan({"train.seed": 1})
    assert third.shared[:2] == one.shared[:2]
    assert third.shared[2] != one.shared[2]
    assert plan({"fetch.dataset": "digits"}).shared[0] != one.shared[0]


def test_states_in_the_lock_are_not_shared(project: Path) -> None:
    (project / "in.txt").write_text("data")
    (project / "dvc.yaml").write_text(_TWO_STAGES)
    entry = live_entry(read_pipeline()["preprocess"], project)
    deps = [{"path": path, "md5": md5} for path, md5 in entry.deps.items()]
    section = {"cmd": entry.cmd, "deps": deps, "params": entry.params, "outs": [{"path": "data.txt", "md5": "0" * 32}]}
    YAML().dump({"schema": "2.0", "stages": {"preprocess": section}}, project / "dvc.lock")
    assert plan({"train.seed": 1}, stage="train").shared == ()
    assert len(plan({"preprocess.seed": 1}, stage="train").shared) == 1
    (project / "in.txt").write_text("other data")
    assert len(plan({"train.seed": 1}, stage="train").shared) == 1


_TWO_STAGES = """
stages:
  preprocess:
    cmd: python preprocess.py
    deps: [in.txt]
    params: [preprocess]
    outs: [data.txt]
  train:
    cmd: python train.py
    deps: [data.txt]
    params: [train]
    outs: [models]
"""
