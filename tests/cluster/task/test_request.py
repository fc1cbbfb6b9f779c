"""What a job is told is plain JSON; other versions of Python or of a package are one line."""

import dataclasses
import json
from pathlib import Path

import pytest

from gradtrail.cluster.task.request import Experiment, Request, own_packages, own_python, require_same_versions
from gradtrail.support.errors import UserError

EXPERIMENT = Experiment(
    label="cnn, seed 0",
    name="gradtrail-0",
    changes={"train.model": "cnn", "train.seed": 0},
    stage="evaluate",
    shared=(),
)
REQUEST = Request(
    git_url="/srv/x.git",
    commit="0" * 40,
    tracking_uri="http://127.0.0.1:5000",
    cache=None,
    cpus=1.0,
    gpus=0.0,
    python=own_python(),
    packages=own_packages(),
    experiments=(EXPERIMENT,),
)


def test_a_request_comes_back_as_it_was_written(tmp_path: Path) -> None:
    REQUEST.write(tmp_path / "request.json")
    assert Request.read(tmp_path / "request.json") == REQUEST


def test_a_request_of_another_version_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(dataclasses.asdict(REQUEST) | {"colour": "red"}))
    with pytest.raises(UserError, match=r"^request\.json\.colour is not a known key"):
        Request.read(path)


def test_the_same_versions_are_accepted() -> None:
    require_same_versions(REQUEST, "node")


def test_another_version_names_node_package_and_both_versions() -> None:
    with pytest.raises(UserError, match=rf"^a node: Python {own_python()}, but 3\.9 asked for"):
        require_same_versions(dataclasses.replace(REQUEST, python="3.9"), "a node")
    found = own_packages()["jax"]
    with pytest.raises(UserError, match=rf"^a node: jax {found}, but 0\.1 is asked for"):
        require_same_versions(dataclasses.replace(REQUEST, packages={"jax": "0.1"}), "a node")
    with pytest.raises(UserError, match=r"^a node: absent is not installed, but 1 is asked for"):
        require_same_versions(dataclasses.replace(REQUEST, packages={"absent": "1"}), "a node")


def test_changes_are_options_of_dvc() -> None:
    assert EXPERIMENT.options == ["-S", "train.model=cnn", "-S", "train.seed=0"]
