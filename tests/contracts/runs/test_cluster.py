"""An experiment made for a cluster, with the real DVC and MLflow: files, runs and ref are where all can get them."""

import contextlib
import importlib.util
import os
import sqlite3
import sys
from pathlib import Path

import pytest
from cluster_repository import new_request, run_git
from cluster_services import BUCKET, require_keys, s3, why_no_cluster
from projects import Project, environment
from small_project import finished_small_project

from gradtrail.cluster.checkout import node_folder
from gradtrail.cluster.home import fetch_experiments
from gradtrail.cluster.make import make_experiment
from gradtrail.cluster.places import Places
from gradtrail.cluster.plan import plan_experiments
from gradtrail.cluster.records import ensure_runs, states_of
from gradtrail.cluster.refs import experiment_ref
from gradtrail.cluster.request import Experiment as PlannedExperiment
from gradtrail.cluster.request import Request
from gradtrail.support.errors import UserError
from gradtrail.tracking.runs import StoredRuns
from gradtrail.tracking.state import Experiment
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


@pytest.mark.slow
def test_experiment_is_made_in_a_clone_and_shared_with_other_machines(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = project.git("rev-parse", "HEAD").strip()
    changes = {"default bins": {RATE: 0.25}, "7 bins": {RATE: 0.25, "evaluate.calibration_bins": 7}}
    experiment, same_training = plan_experiments(changes, "evaluate", commit)
    assert len(experiment.shared) == 1, "the training; the fetched data are in the lock"
    assert same_training.shared == experiment.shared
    store = f"sqlite:///{tmp_path / 'store.db'}"
    project.run(sys.executable, "-m", "gradtrail", "sync", env={"MLFLOW_TRACKING_URI": store, **_own_code(project)})
    request = _request(tmp_path, commit, store, experiment)
    assert make_experiment(request, experiment) == "made"
    assert make_experiment(request, experiment) == "there"

    ref = experiment_ref(commit, experiment.name)
    assert run_git(tmp_path / "shared.git", "for-each-ref", "--format=%(refname)", "refs/exps").split() == [ref]
    made = run_git(tmp_path / "shared.git", "rev-parse", ref)

    places = Places(commit=commit, remote="origin", git_url=request.git_url, tracking_uri=store, cache=None)
    fetch_experiments(places, [experiment.name])
    assert experiment.name in project.dvc("exp", "list", "--name-only")
    project.dvc("exp", "pull", "origin", experiment.name)
    project.dvc("exp", "apply", experiment.name)
    assert "0.25" in (project.folder / "models/final.safetensors").read_text()

    node = node_folder(request.git_url)
    find = StoredRuns(StoreClient(store))
    states = states_of(node.clone.parent / "checkouts" / commit[:16] / "0", made, ["train", "evaluate"])
    runs_by_stage = {stage: find({"state": state}, finished=True) for stage, state in states.items()}
    assert {stage: len(runs) for stage, runs in runs_by_stage.items()} == {"train": 1, "evaluate": 1}
    assert {run.data.tags["dvc.exp_name"] for runs in runs_by_stage.values() for run in runs} == {experiment.name}

    # A run that the server does not have is rebuilt from the files
    (evaluation,) = runs_by_stage["evaluate"]
    StoreClient(store).delete_run(evaluation.info.run_id)
    with node.checkout(commit, None) as folder:
        run_git(folder, "fetch", "-q", request.git_url, f"{ref}:{ref}")
        env = environment() | _own_code(project) | {"MLFLOW_TRACKING_URI": store}
        recorded = Experiment(name=experiment.name, baseline=commit, commit=made)
        ensure_runs(env, folder, recorded, ["train", "evaluate"], patience=10)
    (rebuilt,) = find({"state": states["evaluate"]}, finished=True)
    assert rebuilt.data.tags["rebuilt"] == "true"
    assert rebuilt.data.tags["dvc.exp_name"] == experiment.name

    # Another node, which fetched the inputs before this training was made, restores it from the DVC remote
    monkeypatch.setenv("GRADTRAIL_CLUSTER_DIR", str(tmp_path / "another"))
    other_node = node_folder(request.git_url)
    other_node.path.mkdir(parents=True)
    (other_node.path / f"fetched-{commit[:16]}-evaluate").touch()
    assert make_experiment(request, same_training) == "made"
    (training,) = find({"state": states["train"]})
    assert training.data.tags.get("attempts", "1") == "1"
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
        commit = project.git("rev-parse", "HEAD").strip()
        (experiment,) = plan_experiments({"a rate": {RATE: 0.25}}, "evaluate", commit)
        store = f"sqlite:///{tmp_path / 'store.db'}"
        request = _request(tmp_path, commit, store, experiment)
        for name, value in key.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "UNKNOWNKEY")
        with pytest.raises(UserError) as caught:
            make_experiment(request, experiment)
        message = str(caught.value)
        assert message.startswith(f"the inputs of {commit[:12]} were not fetched: ")
        assert "\n" not in message
        assert "Forbidden" in message
        assert key["AWS_SECRET_ACCESS_KEY"] not in message
        assert not run_git(tmp_path / "shared.git", "for-each-ref", "refs/exps")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AWS_ACCESS_KEY_ID"])
        assert make_experiment(request, experiment) == "made"


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


def _request(folder: Path, commit: str, store: str, experiment: PlannedExperiment) -> Request:
    git_url = str(folder / "shared.git")
    return new_request(git_url=git_url, commit=commit, tracking_uri=store, experiments=(experiment,))


def _own_code(project: Project) -> dict[str, str]:
    return {"PYTHONPATH": str(project.folder / "src")}


def _require_no_secret(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and os.access(path, os.R_OK):
            assert SECRET.encode() not in path.read_bytes(), path
