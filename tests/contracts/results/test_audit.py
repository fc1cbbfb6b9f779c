"""The optional pipelines run alone, and are tracked, rebuilt and repeatable like every stage."""

import contextlib
import json
import shutil
import sqlite3

import numpy as np
import pandas as pd
import pytest
from projects import ROOT, Project, finished_project
from sklearn.metrics import average_precision_score, roc_auc_score

from gradtrail.core.evaluate import fill_bins
from gradtrail.stages.common.files import digest
from gradtrail.tracking.tags import outputs

QUICK = {
    "audit.rounds": 2,
    "audit.epochs": 12,
    "audit.batch_size": 32,
    "audit.num_suspects": 5,
    "environment.xla_flags": [],  # those of a finished project compile sooner, and train slowly; preprocess reads them
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of a finished project, whose training labels are wrong in one of ten, audited."""
    project = finished_project().copy(tmp_path_factory.mktemp("audit") / "project")
    (project.folder / "pipeline" / "audit").mkdir()
    shutil.copy(ROOT / "pipeline" / "audit" / "dvc.yaml", project.folder / "pipeline" / "audit")
    for key, value in QUICK.items():
        project.set(key, value)
    project.commit("an audit")
    assert "audit" not in project.dvc("repro", "--dry"), "dvc repro does not run it"
    assert project.ran(project.gradtrail("repro", "pipeline/audit/dvc.yaml")) == [
        "preprocess",
        "pipeline/audit/dvc.yaml:audit",
    ]
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
        with contextlib.closing(sqlite3.connect(project.folder / "mlflow.db")) as store:
            query = (
                "select dataset_source from datasets join inputs on source_id = dataset_uuid where destination_id = ?"
            )
            assert store.execute(query, (run["id"],)).fetchall() == [('{"uri": "data/processed"}',)]
        project.empty_store()
        assert "audit" in project.sync()
    assert "audit" in project.gradtrail("show", project.runs_of("audit")[0]["id"])


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
def test_it_runs_by_itself_and_its_run_is_tracked(tmp_path_factory: pytest.TempPathFactory) -> None:
    project: Project = finished_project().copy(tmp_path_factory.mktemp("privacy_audit") / "project")
    shutil.copytree(ROOT / "pipeline" / "privacy_audit", project.folder / "pipeline" / "privacy_audit")
    target = "pipeline/privacy_audit/dvc.yaml"
    refused = project.gradtrail("repro", target, status=255)
    assert "privacy_audit: train.privacy.enabled must be true for a privacy audit, got false" in refused
    for key, value in PRIVATE.items():
        project.set(key, value)
    project.commit("a private training")
    assert project.ran(project.gradtrail("repro", target)) == [f"{target}:privacy_audit"]
    metrics = json.loads((project.folder / "results" / "metrics" / "privacy_audit.json").read_text())
    assert (metrics["canaries"], metrics["guesses"]) == (40, 4)
    assert metrics["epsilon_lower_bound"] <= metrics["epsilon"]
    (run,) = project.runs_of("privacy_audit")
    assert outputs(run["tags"])["results/privacy_audit"] == digest(project.folder / "results/privacy_audit")
    lock = project.folder / "pipeline" / "privacy_audit" / "dvc.lock"
    before = lock.read_bytes()
    project.dvc("repro", "--force", "--single-item", target)
    assert lock.read_bytes() == before


SMOOTH = {
    "train.precision": "float32",
    "train.mlp.activation": "gelu",
    "train.adamw.learning_rate": 1e-3,
    "what_if.num_examples": 3,
}


@pytest.mark.nightly
def test_what_if_predicts_for_the_trained_network_and_its_run_is_tracked(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    project: Project = finished_project().copy(tmp_path_factory.mktemp("what_if") / "project")
    shutil.copytree(ROOT / "pipeline" / "what_if", project.folder / "pipeline" / "what_if")
    target = "pipeline/what_if/dvc.yaml"
    refused = project.gradtrail("repro", target, status=255)
    assert "what_if: train.precision must be float32 or bfloat16" in refused
    for key, value in SMOOTH.items():
        project.set(key, value)
    project.commit("a smooth training")
    output = project.gradtrail("repro", target)
    assert project.ran(output) == ["train", f"{target}:what_if"]
    assert "warning" not in output
    outputs_csv = pd.read_csv(project.folder / "results/what_if/outputs.csv")
    influence = pd.read_parquet(project.folder / "results/what_if/influence.parquet")
    assert influence.filter(like="remove/").columns.tolist() == [f"remove/{name}" for name in outputs_csv["output"]]
    (run,) = project.runs_of("what_if")
    assert outputs(run["tags"])["results/what_if"] == digest(project.folder / "results/what_if")
    assert run["metrics"]["what_if/metasmoothness"] > 0.9
    lock = project.folder / "pipeline" / "what_if" / "dvc.lock"
    before = lock.read_bytes()
    project.dvc("repro", "--force", "--single-item", target)
    assert lock.read_bytes() == before

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
