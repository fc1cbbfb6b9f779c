"""The privacy audit is an optional pipeline: refused without privacy, run alone, tracked, repeatable."""

import json
import shutil

import pytest
from projects import ROOT, Project, finished_project

from gradtrail.stages.common.digests import digest
from gradtrail.tracking.mlflow.tags import outputs

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
    out = "results/privacy_audit"
    assert outputs(run["tags"])[out] == digest(project.folder / out)
    lock = (project.folder / "pipeline" / "privacy_audit" / "dvc.lock").read_bytes()
    project.dvc("repro", "--force", "--single-item", target)
    assert (project.folder / "pipeline" / "privacy_audit" / "dvc.lock").read_bytes() == lock
