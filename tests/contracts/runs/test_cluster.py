"""An experiment made for a cluster, with the real DVC and MLflow: files, runs and ref are where all can get them."""

import contextlib
import importlib.util
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_repository import run_git
from cluster_services import BUCKET, require_keys, s3, why_no_cluster
from projects import Project, environment
from small_project import finished_small_project

from gradtrail.cluster.engine import fetch_results
from gradtrail.cluster.request import Places, Request, own_versions, plan_experiments
from gradtrail.cluster.task import make_experiment
from gradtrail.support.errors import UserError
from gradtrail.tracking.gc import purge
from gradtrail.tracking.runs import StoredRuns
from gradtrail.tracking.store import StoreClient

RATE = "train.adamw.learning_rate"
SECRET = "not-for-any-file"  # noqa: S105


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The small project with a git remote and a DVC remote, which have its first results."""
    project = finished_small_project().copy(tmp_path / "project")
    run_git(tmp_path, "init", "-q", "--bare", "shared.git")
    project.git("remote", "add", "origin", str(tmp_path / "shared.git"))
    project.dvc("remote", "add", "--default", "storage", str(tmp_path / "storage"))
    project.commit("remotes")
    project.git("push", "-q", "origin", "HEAD:main")
    project.dvc("push")
    for name in ("DVC_ROOT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRADTRAIL_CLUSTER_DIR", str(tmp_path / "node"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.chdir(project.folder)
    return project


@pytest.mark.nightly
def test_experiment_is_made_in_a_clone_and_shared_with_other_machines(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"default bins": {RATE: 0.25}, "7 bins": {RATE: 0.25, "evaluate.calibration_bins": 7}}
    request = _request(project, tmp_path, changes)
    experiment, same_training = request.experiments
    assert len(experiment.shared) == 1, "the training; the commit has the data"
    assert same_training.shared == experiment.shared
    store = request.places.tracking_uri
    project.run(sys.executable, "-m", "gradtrail", "sync", env={"MLFLOW_TRACKING_URI": store, **_own_code(project)})
    assert make_experiment(request, experiment) == "done"
    assert make_experiment(request, experiment) == "done before"
    assert run_git(tmp_path / "shared.git", "for-each-ref", "--format=%(refname)", "refs/exps") == experiment.ref

    name = experiment.ref.rpartition("/")[2]
    fetch_results(request.places, [experiment.ref])
    assert name in project.dvc("exp", "list", "--name-only")
    project.dvc("exp", "pull", "origin", name)
    project.dvc("exp", "apply", name)
    assert "0.25" in (project.folder / "models/final.safetensors").read_text()

    def finished(stage: str) -> dict[str, str]:
        """Return the tags of the one finished run of the experiment's stage."""
        runs = StoredRuns(StoreClient(store))({"stage": stage, "dvc.exp_name": name}, finished=True)
        (run,) = runs
        return {**run.data.tags, "id": run.info.run_id}

    assert "rebuilt" not in finished("train") | finished("evaluate")

    # The run of another machine was lost with its node: a node with an empty cache gets its files, and rebuilds it
    lost = StoreClient(store).get_run(finished("evaluate")["id"])
    purge(StoreClient(store), [lost])
    run_git(tmp_path / "shared.git", "update-ref", "-d", experiment.ref)
    monkeypatch.setenv("GRADTRAIL_CLUSTER_DIR", str(tmp_path / "another node"))
    assert make_experiment(request, experiment) == "done"
    assert finished("evaluate")["rebuilt"] == "true"

    assert make_experiment(request, same_training) == "done"
    assert finished("train").get("attempts", "1") == "1", "DVC restored the training"
    _require_no_secret(tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster())
def test_refused_key_of_s3_is_one_line_and_a_good_one_works(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    with s3(tmp_path, environment() | good) as url:
        project.dvc("remote", "modify", "storage", "url", f"s3://{BUCKET}/dvc")
        project.dvc("remote", "modify", "storage", "endpointurl", url)
        project.commit("a remote on S3")
        project.git("push", "-q", "origin", "HEAD:main")
        project.dvc("push", "--run-cache", env=good)
        key = require_keys(url)
        request = _request(project, tmp_path, {"a rate": {RATE: 0.25}})
        (experiment,) = request.experiments
        for name, value in key.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "UNKNOWNKEY")
        with pytest.raises(UserError) as caught:
            make_experiment(request, experiment)
        message = str(caught.value)
        assert "\n" not in message
        assert "Forbidden" in message
        assert key["AWS_SECRET_ACCESS_KEY"] not in message
        assert not run_git(tmp_path / "shared.git", "for-each-ref", "refs/exps")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AWS_ACCESS_KEY_ID"])
        assert make_experiment(request, experiment) == "done"


@pytest.mark.nightly
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="not installed: ray")
def test_grid_runs_on_a_local_ray(project: Project) -> None:
    evaluate = project.folder / "pipeline" / "evaluate.py"
    evaluate.write_text(evaluate.read_text().replace('"length"', '"accuracy": 0.9, "loss": 0.5, "length"'))
    project.commit("a figure to compare")
    command = (sys.executable, "-m", "gradtrail", "compare", "--params", f"{RATE}=0.25,0.5", "--on", "local")
    message = project.run(*command, env=_own_code(project))
    assert "2 of 2" in message
    assert "adamw.learning_rate=0.25" in message
    again = project.run(*command, env=_own_code(project))
    assert "job" not in again, "nothing was missing"
    refs = project.git("for-each-ref", "--format=%(refname)", "refs/exps/*/*/gradtrail-*").splitlines()
    assert len(refs) == 2
    with contextlib.closing(sqlite3.connect(project.folder / "mlflow.db")) as store:
        query = "select count(*), count(distinct value) from tags where key = 'state'"
        total, distinct = store.execute(query).fetchone()
    assert total == distinct


def _request(project: Project, folder: Path, changes: dict[str, dict[str, Any]]) -> Request:
    commit = project.git("rev-parse", "HEAD").strip()
    store = f"sqlite:///{folder / 'store.db'}"
    places = Places(commit=commit, git_url=str(folder / "shared.git"), tracking_uri=store, cache=None)
    experiments = tuple(plan_experiments(changes, "evaluate", commit))
    return Request(places=places, cpus=1.0, gpus=0.0, versions=own_versions(), experiments=experiments)


def _own_code(project: Project) -> dict[str, str]:
    return {"PYTHONPATH": str(project.folder / "src")}


def _require_no_secret(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and os.access(path, os.R_OK):
            assert SECRET.encode() not in path.read_bytes(), path
