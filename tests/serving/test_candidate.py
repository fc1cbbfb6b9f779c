"""What a name refers to: of the exports of one training, the one that the lock, or the named run, records."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exports import write_small_export
from mlflow import MlflowClient
from model_store import LABELS, evaluation, log_export, training
from projects import finished_project

from gradtrail.serving.candidate import find_candidate, find_champion
from gradtrail.serving.release import promote
from gradtrail.stages.model.exported import read_manifest
from gradtrail.support.errors import UserError

FIND = """
import sys
from gradtrail.serving.candidate import find_candidate
from gradtrail.support.errors import UserError
from gradtrail.tracking.store import open_store
for name in sys.argv[1:]:
    try:
        candidate = find_candidate(name, open_store())
        print(candidate.export.digest, candidate.evaluation.data.params["evaluate.weights"])
    except UserError as error:
        print(error)
"""


def test_each_export_of_a_training_has_its_own_metrics_and_predictions(
    client: MlflowClient, exported: Callable[[int], Path], tmp_path: Path
) -> None:
    run = training(client)
    exports = {"final": exported(0), "best": write_small_export(tmp_path / "best", weights="best")}
    for weights, export in exports.items():
        log_export(client, run, export)
        evaluation(client, run, (LABELS + (weights == "best")) % 10, weights=weights)
    with pytest.raises(UserError, match=r"mlp 0: 2 runs; give the id of one: (\w{8}), (\w{8})$") as error:
        find_candidate("mlp 0", client)
    found = {}
    for run_id in re.findall(r"\b[0-9a-f]{8}\b", str(error.value)):
        candidate = find_candidate(run_id, client)
        assert candidate.run.info.run_id == run.info.run_id
        found[candidate.manifest.weights] = candidate
        assert np.array_equal(candidate.predictions["predicted"], LABELS) == (candidate.manifest.weights == "final")
        exported_id = candidate.exported.info.run_id if candidate.exported else ""
        client.log_metric(exported_id, "export/accuracy", float(candidate.manifest.weights == "final"))
        assert promote(run_id, as_champion=True, is_forced=True, reason="") == 0
        champion = find_champion(candidate)
        assert champion is not None
        assert (champion.export.digest, champion.exported) == (candidate.export.digest, candidate.exported)
    assert found.keys() == exports.keys()
    for weights, candidate in found.items():
        again = find_candidate(candidate.exported.info.run_id, client)
        assert again.export_metrics == {"export/accuracy": weights == "final"}

    client.delete_logged_model(found["best"].export.model_id)
    with pytest.raises(
        UserError, match="is no model in MLflow's store; `dvc repro export` or `gradtrail sync` logs it"
    ):
        find_candidate(found["best"].exported.info.run_id, client)


@pytest.mark.slow
def test_restored_workspace_a_commit_and_an_experiment_have_the_export_of_their_lock(tmp_path: Path) -> None:
    """Export the best weights, then go back to the final ones, which DVC restores without running a stage."""
    project = finished_project().copy(tmp_path / "project")

    def digest() -> str:
        return read_manifest(project.folder / "models/export").digest

    final = digest()
    project.set("evaluate.weights", "best")
    assert project.ran(project.dvc("repro", "export")) == ["evaluate", "export"]
    best = digest()
    project.dvc("exp", "save", "--name", "with-best")
    project.git("checkout", "params.yaml")
    assert project.ran(project.dvc("repro", "export")) == []
    assert digest() == final != best

    (run,) = project.runs_of("train")
    lines = project.python("-c", FIND, "workspace", "HEAD", "with-best", run["id"]).splitlines()
    assert lines[:3] == [f"{final} final", f"{final} final", f"{best} best"]
    assert ": 2 runs; give the id of one: " in lines[3]
    project.gradtrail("promote", "workspace")
    code = "from gradtrail.serving.registry import resolve; print(resolve('models:/digits@challenger').digest)"
    assert project.python("-c", code) == f"{final}\n"
