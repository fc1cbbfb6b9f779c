"""A training with two members through the real stages, beside trainings by themselves, on the digits."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from projects import Project, finished_project

from gradtrail.stages.common.digests import digest

pytestmark = pytest.mark.slow
SCORES = "results/gradients/scores.parquet"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scores of the second member's seed, trained by itself."""
    project = finished_project().copy(tmp_path_factory.mktemp("alone") / "project")
    project.set("train.seed", seed_of(project) + 1)
    project.dvc("repro", "evaluate", "gradients")
    return project.folder


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with the run of a single network, and after it that of two members from the same seed."""
    project = finished_project().copy(tmp_path_factory.mktemp("both") / "project")
    project.set("train.members", 2)
    project.dvc("repro")
    return project


def seed_of(project: Project) -> int:
    run = next(run for run in project.runs_of("train"))
    return int(run["params"]["train.seed"])


def metrics_of(folder: Path, stage: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "results" / "metrics" / f"{stage}.json").read_text())
    return result


def test_each_member_has_the_bytes_of_the_training_with_its_seed(both: Project, alone: Path) -> None:
    first, second = seed_of(both), seed_of(both) + 1
    for seed, folder in ((first, finished_project().folder), (second, alone)):
        scores = both.folder / "results" / "gradients" / "members" / f"seed_{seed}.parquet"
        assert digest(scores) == digest(folder / SCORES)
        weights = both.folder / "models" / "members" / f"seed_{seed}" / "final.safetensors"
        assert digest(weights) == digest(folder / "models" / "final.safetensors")
    mean, own_result = pd.read_parquet(both.folder / SCORES), pd.read_parquet(finished_project().folder / SCORES)
    other = pd.read_parquet(alone / SCORES)
    assert mean["loss"].to_numpy() == pytest.approx(((own_result["loss"] + other["loss"]) / 2).to_numpy(), rel=1e-5)
    half = abs(own_result["loss"].astype(float) - other["loss"]) / 2
    assert mean["loss_se"].to_numpy() == pytest.approx(half.to_numpy(), rel=1e-4, abs=1e-7)
    for stage, key in (("gradients", "grad_norm_median"), ("train", "validation_loss"), ("evaluate", "loss")):
        singles = [metrics_of(folder, stage)[key] for folder in (finished_project().folder, alone)]
        assert metrics_of(both.folder, stage)[key] == pytest.approx(sum(singles) / 2, rel=1e-6)


def test_each_evaluation_belongs_to_its_own_training(both: Project) -> None:
    """Both trainings wrote the same `models/final.safetensors`, that of the first seed."""
    runs = {str(run["params"].get("train.members", "1")): run for run in both.runs_of("train")}
    accuracy = metrics_of(finished_project().folder, "evaluate")["accuracy"]
    assert runs["1"]["metrics"]["eval/accuracy"] == pytest.approx(accuracy)
    assert "eval/ensemble_accuracy" not in runs["1"]["metrics"]
    result = metrics_of(both.folder, "evaluate")
    for key in ("accuracy", "accuracy_sd", "ensemble_accuracy"):
        assert runs["2"]["metrics"][f"eval/{key}"] == pytest.approx(result[key])
    assert all(len(run["metrics"]) <= 40 for run in both.runs())
    assert "by their ensemble" in runs["2"]["tags"]["mlflow.note.content"]


def test_a_lost_store_is_rebuilt_with_the_members(both: Project) -> None:
    before = {run["tags"]["state"]: run["metrics"]["eval/accuracy"] for run in both.runs_of("train")}
    both.empty_store()
    both.sync()
    after = {run["tags"]["state"]: run["metrics"]["eval/accuracy"] for run in both.runs_of("train")}
    assert after == pytest.approx(before)
