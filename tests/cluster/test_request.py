"""Experiments have the same name if and only if they are the same; requests are plain JSON of the same versions."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from cluster_repository import SharedRepository
from projects import ROOT

from gradtrail.cluster.request import Experiment, Request, own_versions, plan_experiments
from gradtrail.support.errors import UserError

COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's files as far as a plan reads them."""
    (tmp_path / "pipeline").mkdir()
    for name in ("dvc.yaml", "params.yaml", "pipeline/versions.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)


def plan(changes: dict[str, Any], commit: str = COMMIT, stage: str = "evaluate") -> Experiment:
    (experiment,) = plan_experiments({"a label": changes}, stage, commit)
    return experiment


def test_name_depends_on_commit_stage_and_the_params_that_are_read() -> None:
    one = plan({"train.seed": 1})
    assert one.ref.startswith(f"refs/exps/aa/{'a' * 38}/gradtrail-")
    assert plan({"train.seed": 1}).ref == one.ref
    assert plan({"train.seed": 2}).ref != one.ref
    assert plan({"train.seed": 1}, commit="b" * 40).ref != one.ref
    assert plan({"train.seed": 1}, stage="gradients").ref != one.ref
    assert plan({"train.seed": 1, "gradients.num_largest": 7}).ref == one.ref
    changes = {label: {"train.seed": 1} for label in ("one", "again")}
    (experiment,) = plan_experiments(changes, "evaluate", COMMIT)
    assert experiment.label == "one"


def test_experiments_share_the_states_that_the_commit_does_not_have() -> None:
    assert plan({"evaluate.calibration_bins": 5}).shared == ()
    one, other = (plan({"train.seed": 1, "evaluate.calibration_bins": bins}) for bins in (5, 7))
    assert one.ref != other.ref
    assert len(one.shared) == 1, "the training"
    assert one.shared == other.shared
    data = plan({"fetch.dataset": "digits"})
    assert len(data.shared) == 3, "fetch, preprocess and train"
    assert plan({"fetch.dataset": "digits", "train.seed": 1}).shared[:2] == data.shared[:2]


def test_request_is_read_as_it_was_written(shared: SharedRepository, tmp_path: Path) -> None:
    request = dataclasses.replace(
        shared.request(tmp_path), experiments=(plan({"train.seed": 0, "train.model": "cnn"}),)
    )
    assert Request.from_json(request.as_json()) == request


def test_message_about_a_version_names_node_package_and_both_versions(shared: SharedRepository, tmp_path: Path) -> None:
    request = shared.request(tmp_path)
    request.require_same_versions("a node")
    for package, version, message in (
        ("jax", "0.1", f"jax {own_versions()['jax']}, but the request needs 0.1"),
        ("absent", "1", "absent is not installed, but the request needs 1"),
    ):
        with pytest.raises(UserError, match=f"^a node: {message}: use one lock, or one image, for both$"):
            dataclasses.replace(request, versions={package: version}).require_same_versions("a node")
