"""A training with two members through the real stages, beside trainings by themselves, on the digits."""

import pandas as pd
import pytest
from projects import Project, finished_project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with the run of a single network, and after it that of two members from the same seed."""
    project = finished_project().copy(tmp_path_factory.mktemp("both") / "project")
    project.set("train.members", 2)
    project.dvc("repro")
    return project


def test_each_evaluation_belongs_to_its_own_training(both: Project) -> None:
    """Both trainings wrote the same `models/final.safetensors`, that of the first seed."""
    runs = {str(run["params"].get("train.members", "1")): run for run in both.runs_of("train")}
    accuracy = finished_project().metrics_of("evaluate")["accuracy"]
    assert runs["1"]["metrics"]["eval/accuracy"] == pytest.approx(accuracy, rel=1e-3)
    assert "eval/ensemble_accuracy" not in runs["1"]["metrics"]
    result = both.metrics_of("evaluate")
    for key in ("accuracy", "accuracy_sd", "ensemble_accuracy"):
        assert runs["2"]["metrics"][f"eval/{key}"] == pytest.approx(result[key], rel=1e-3)
    epochs = pd.read_csv(both.folder / "results" / "train" / "epochs.csv")
    for key, best in {"accuracy": epochs["validation_accuracy"].max(), "loss": epochs["validation_loss"].min()}.items():
        assert runs["2"]["metrics"][f"train/best_validation_{key}"] == pytest.approx(best, rel=1e-3)
    assert all(len(run["metrics"]) <= 40 for run in both.runs())
    assert "Their ensemble classifies" in runs["2"]["tags"]["mlflow.note.content"]


def test_a_lost_store_is_rebuilt_with_the_members(both: Project) -> None:
    before = {run["tags"]["state"]: run["metrics"]["eval/accuracy"] for run in both.runs_of("train")}
    both.empty_store()
    both.sync()
    after = {run["tags"]["state"]: run["metrics"]["eval/accuracy"] for run in both.runs_of("train")}
    assert after == pytest.approx(before)
