"""The optional pipelines run alone, and are tracked, rebuilt and repeatable like every stage."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from projects import ROOT, Project, finished_project
from sklearn.metrics import average_precision_score, roc_auc_score

from gradtrail.core.evaluate import fill_bins
from gradtrail.stages.common.files import digest
from gradtrail.tracking.tags import outputs

LOCKS = shutil.ignore_patterns("dvc.lock", ".dvcignore")
QUICK = {
    "audit.rounds": 2,
    "audit.epochs": 12,
    "audit.batch_size": 32,
    "audit.num_suspects": 5,
    "environment.xla_flags": [],  # those of a finished project compile sooner, and train slowly
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of a finished project, whose training labels are wrong in one of ten, audited."""
    project = finished_project().copy(tmp_path_factory.mktemp("audit") / "project")
    shutil.copytree(ROOT / "pipeline" / "audit", project.folder / "pipeline" / "audit", ignore=LOCKS)
    project.change(QUICK)
    project.commit("an audit")
    assert "audit" not in project.dvc("repro", "--dry"), "dvc repro does not run it"
    assert project.ran(project.gradtrail("repro", "pipeline/audit/dvc.yaml")) == ["pipeline/audit/dvc.yaml:audit"]
    return project


@pytest.mark.nightly
def test_it_finds_labels_that_preprocess_made_wrong(project: Project) -> None:
    suspects = pd.read_parquet(project.folder / "results/audit/suspects.parquet")
    scores = pd.read_parquet(project.folder / "results/gradients/scores.parquet")
    truth = scores[scores["split"] == "train"].set_index("example_id")["true_label"]
    train = suspects[suspects["split"] == "train"]
    is_wrong = train["label"].to_numpy() != truth.loc[train["example_id"]].to_numpy()
    assert roc_auc_score(is_wrong, train["score"]) > 0.99
    assert average_precision_score(is_wrong, train["score"]) > 0.95
    assert train["probability_wrong"].sum() == pytest.approx(is_wrong.sum(), rel=0.15)
    detected = train[is_wrong & (train["probability_wrong"] > 0.5)]
    assert (detected["proposed_label"].to_numpy() == truth.loc[detected["example_id"]].to_numpy()).mean() > 0.95
    probabilities = train["probability_wrong"].to_numpy(np.float64)
    bins = fill_bins(probabilities, is_wrong, 15)
    assert bins.expected_calibration_error < 0.03


@pytest.mark.nightly
def test_its_run_is_tracked_and_rebuilt(project: Project) -> None:
    for _ in range(2):
        (run,) = project.runs_of("audit")
        assert run["status"] == "FINISHED"
        assert outputs(run["tags"])["results/audit"] == digest(project.folder / "results/audit")
        assert run["params"]["audit.rounds"] == "2"
        assert "mlflow.parentRunId" not in run["tags"], "it reads no training"
        project.empty_store()
        assert "audit" in project.sync()
    assert "audit" in project.gradtrail("show", project.runs_of("audit")[0]["id"])


def run_optional(name: str, params: dict[str, object], refusal: str, folder: Path) -> tuple[Project, str]:
    """Run an optional pipeline that refuses the params of the finished project; return the output too."""
    project = finished_project().copy(folder / "project")
    shutil.copytree(ROOT / "pipeline" / name, project.folder / "pipeline" / name, ignore=LOCKS)
    target = f"pipeline/{name}/dvc.yaml"
    assert f"{name}: {refusal}" in project.gradtrail("repro", target, status=255)
    project.change(params)
    project.commit(name)
    return project, project.gradtrail("repro", target)


def check_run_and_bytes(project: Project, name: str) -> dict[str, Any]:
    """Assert that a pipeline's run has its outs, and that it writes the same bytes again; return the run."""
    (run,) = project.runs_of(name)
    assert outputs(run["tags"])[f"results/{name}"] == digest(project.folder / "results" / name)
    lock = project.folder / "pipeline" / name / "dvc.lock"
    before = lock.read_bytes()
    project.dvc("repro", "--force", "--single-item", f"pipeline/{name}/dvc.yaml")
    assert lock.read_bytes() == before
    return run


PRIVATE = {
    "train.privacy.enabled": True,
    "train.privacy.delta": 1e-4,
    "train.model": "linear",
    "train.precision": "float32",
    "train.remat": False,
    "train.batch_size": 32,
    "privacy_audit.num_canaries": 20,
    "privacy_audit.trainings": 2,
}


@pytest.mark.nightly
def test_privacy_audit_runs_by_itself_and_its_run_is_tracked(tmp_path: Path) -> None:
    refusal = "train.privacy.enabled must be true for a privacy audit, got false"
    project, output = run_optional("privacy_audit", PRIVATE, refusal, tmp_path)
    assert project.ran(output) == ["pipeline/privacy_audit/dvc.yaml:privacy_audit"]
    metrics = project.metrics_of("privacy_audit")
    assert (metrics["canaries"], metrics["guesses"]) == (40, 4)
    assert metrics["epsilon_lower_bound"] <= metrics["epsilon"]
    check_run_and_bytes(project, "privacy_audit")


SMOOTH = {
    "train.precision": "float32",
    "train.mlp.activation": "gelu",
    "train.adamw.learning_rate": 1e-3,
    "what_if.num_examples": 3,
}


@pytest.mark.nightly
def test_what_if_predicts_for_the_trained_network_and_its_run_is_tracked(tmp_path: Path) -> None:
    refusal = "train.precision must be float32 or bfloat16"
    project, output = run_optional("what_if", SMOOTH, refusal, tmp_path)
    assert project.ran(output) == ["train", "pipeline/what_if/dvc.yaml:what_if"]
    assert "warning" not in output
    outputs_csv = pd.read_csv(project.folder / "results/what_if/outputs.csv")
    influence = pd.read_parquet(project.folder / "results/what_if/influence.parquet")
    assert influence.filter(like="remove/").columns.tolist() == [f"remove/{name}" for name in outputs_csv["output"]]
    assert check_run_and_bytes(project, "what_if")["metrics"]["what_if/metasmoothness"] > 0.9

    # The command trains without examples, once
    said = project.gradtrail("what-if", "--subsets", "3").partition("LDS ")[2]
    results = pd.read_csv(project.folder / "results/comparisons/what_if.csv")
    subsets = results[results["kind"] == "subset"]
    assert len(subsets) == 3 * len(outputs_csv)
    changes = (subsets[column] - subsets["before"] for column in ("predicted", "retrained"))
    assert np.corrcoef(*changes)[0, 1] > 0.9
    trainings = len(project.runs_of("train"))
    assert project.gradtrail("what-if", "--subsets", "3").partition("LDS ")[2] == said != ""
    assert len(project.runs_of("train")) == trainings
