"""A request is plain JSON; other versions of Python or of a package are refused in one line."""

import dataclasses
from pathlib import Path

import pytest
from cluster_repository import new_request

from gradtrail.cluster.request import Experiment, Request, own_packages, own_python, require_same_versions
from gradtrail.support.errors import UserError

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
