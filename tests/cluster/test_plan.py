"""Experiments have the same name if and only if they are the same; requests are plain JSON of the same versions."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from cluster_repository import new_request
from projects import ROOT
from ruamel.yaml import YAML

from gradtrail.cluster.plan import plan_experiments
from gradtrail.cluster.request import Experiment, Request, own_packages, own_python, require_same_versions
from gradtrail.stages.common.pipeline_file import live_entry, read_pipeline
from gradtrail.support.errors import UserError

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
    (experiment,) = plan_experiments({"a label": changes}, stage, commit)
    return experiment


def test_name_depends_on_commit_stage_and_the_params_that_are_read() -> None:
    one = plan({"train.seed": 1})
    assert one.name.startswith("gradtrail-")
    assert plan({"train.seed": 1}).name == one.name
    assert plan({"train.seed": 2}).name != one.name
    assert plan({"train.seed": 1}, commit="b" * 40).name != one.name
    assert plan({"train.seed": 1}, stage="gradients").name != one.name
    assert plan({"train.seed": 1, "gradients.num_largest": 7}).name == plan({"train.seed": 1}).name
    changes = {label: {"train.seed": 1} for label in ("one", "again")}
    (experiment,) = plan_experiments(changes, "evaluate", COMMIT)
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


EXPERIMENT = Experiment(
    label="cnn, seed 0",
    name="gradtrail-0",
    changes={"train.model": "cnn", "train.seed": 0},
    stage="evaluate",
    shared=(),
)
REQUEST = new_request(experiments=(EXPERIMENT,))


def test_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    REQUEST.write(tmp_path / "request.json")
    assert Request.read(tmp_path / "request.json") == REQUEST


def test_message_about_a_version_names_node_package_and_both_versions() -> None:
    require_same_versions(REQUEST, "a node")
    with pytest.raises(UserError, match=rf"^a node: Python {own_python()}, but the request needs 3\.9"):
        require_same_versions(dataclasses.replace(REQUEST, python="3.9"), "a node")
    installed = own_packages()["jax"]
    with pytest.raises(UserError, match=rf"^a node: jax {installed}, but the request needs 0\.1"):
        require_same_versions(dataclasses.replace(REQUEST, packages={"jax": "0.1"}), "a node")
    with pytest.raises(UserError, match=r"^a node: absent is not installed, but the request needs 1"):
        require_same_versions(dataclasses.replace(REQUEST, packages={"absent": "1"}), "a node")
