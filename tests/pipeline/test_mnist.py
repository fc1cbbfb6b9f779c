"""The real pipeline with default params on the real MNIST: what the README promises."""

import os

import pytest
from projects import Project, copy_project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("MNIST_DIR"), reason="MNIST_DIR is not set: it names a folder with the four files of MNIST"
    ),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = copy_project(tmp_path_factory.mktemp("mnist") / "project")
    project.dvc("repro", env={"MNIST_DIR": os.environ["MNIST_DIR"]})
    return project


def test_default_model_reaches_the_promised_accuracy(project: Project) -> None:
    evaluation = project.metrics_of("evaluate")
    assert evaluation["dataset"] == "mnist"
    assert evaluation["num_examples"] == 10_000
    assert evaluation["accuracy"] >= 0.983
    assert project.metrics_of("gradients")["num_examples"] == 70_000


def test_nothing_runs_twice(project: Project) -> None:
    assert project.ran(project.dvc("repro")) == []
