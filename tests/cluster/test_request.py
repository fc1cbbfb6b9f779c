"""Equal experiments have equal names; what a cluster needs is checked before anything is sent, in one line each."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from cluster_repository import SharedRepository, run_git
from projects import ROOT

from gradtrail.cluster.request import (
    PlannedExperiment,
    Request,
    local_places,
    own_versions,
    plan_experiments,
    read_refs,
    shared_places,
)
from gradtrail.support.errors import UserError

COMMIT = "a" * 40


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's files as far as a plan reads them."""
    (tmp_path / "pipeline").mkdir()
    for name in ("dvc.yaml", "params.yaml", "pipeline/versions.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)


def plan(changes: dict[str, Any], commit: str = COMMIT, stage: str = "evaluate") -> PlannedExperiment:
    (experiment,) = plan_experiments({"a label": changes}, stage, commit)
    return experiment


@pytest.mark.usefixtures("planned")
def test_name_depends_on_commit_stage_and_the_params_that_are_read() -> None:
    one = plan({"train.seed": 1})
    assert one.ref.startswith(f"refs/exps/aa/{'a' * 38}/gradtrail-")
    assert plan({"train.seed": 1}).ref == one.ref
    assert plan({"train.seed": 2}).ref != one.ref
    assert plan({"train.seed": 1}, commit="b" * 40).ref != one.ref
    assert plan({"train.seed": 1}, stage="gradients").ref != one.ref
    assert plan({"train.seed": 1, "gradients.num_largest": 7}).ref == one.ref
    changes = {label: {"train.seed": 1} for label in ("one", "again")}
    (experiment,) = plan_experiments(changes, "evaluate", COMMIT)
    assert experiment.label == "one"


@pytest.mark.usefixtures("planned")
def test_experiments_share_the_states_that_the_commit_does_not_have() -> None:
    assert plan({"evaluate.calibration_bins": 5}).shared == ()
    one, other = (plan({"train.seed": 1, "evaluate.calibration_bins": bins}) for bins in (5, 7))
    assert one.ref != other.ref
    assert len(one.shared) == 1, "the training"
    assert one.shared == other.shared
    data = plan({"fetch.dataset": "digits"})
    assert len(data.shared) == 3, "fetch, preprocess and train"
    assert plan({"fetch.dataset": "digits", "train.seed": 1}).shared[:2] == data.shared[:2]


@pytest.mark.usefixtures("planned")
def test_request_is_read_as_it_was_written(shared: SharedRepository, tmp_path: Path) -> None:
    request = dataclasses.replace(
        shared.request(tmp_path), experiments=(plan({"train.seed": 0, "train.model": "cnn"}),)
    )
    assert Request.from_json(request.as_json()) == request


def test_message_about_a_version_names_node_package_and_both_versions(shared: SharedRepository, tmp_path: Path) -> None:
    request = shared.request(tmp_path)
    request.require_same_versions("a node")
    for package, version, message in (
        ("jax", "0.1", f"jax {own_versions()['jax']}, but the request needs 0.1"),
        ("absent", "1", "absent is not installed, but the request needs 1"),
    ):
        with pytest.raises(UserError, match=f"^a node: {message}: use one lock, or one image, for both$"):
            dataclasses.replace(request, versions={package: version}).require_same_versions("a node")


@pytest.fixture
def project(shared: SharedRepository, monkeypatch: pytest.MonkeyPatch) -> SharedRepository:
    """A clone whose commit is pushed, with a DVC remote and a tracking server; it is the working folder."""
    monkeypatch.chdir(shared.clone)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://10.0.0.5:5000")
    return shared


def refused(message: str) -> None:
    with pytest.raises(UserError, match=message):
        shared_places()


def test_addresses_are_those_of_remotes_and_server(project: SharedRepository) -> None:
    places = shared_places()
    assert (places.commit, places.git_url) == (project.commit, project.url)
    assert (places.tracking_uri, places.cache) == ("http://10.0.0.5:5000", None)
    assert read_refs(project.url, ["refs/heads/main", "refs/heads/main-2"]) == {"refs/heads/main": project.commit}


def test_uncommitted_changes_of_inputs_alone_are_refused(project: SharedRepository) -> None:
    for name in ("results/table.md", "experiments.yaml", "models/weights"):
        (project.clone / name).parent.mkdir(exist_ok=True)
        (project.clone / name).touch()
    assert shared_places().commit == project.commit
    (project.clone / "src" / "code" / "new.py").touch()
    refused(r"^uncommitted changes in src/code/new\.py: a cluster runs commits; commit them, or `git stash` them$")
    (project.clone / "params.yaml").write_text("train: 2\n")
    refused(r"^uncommitted changes in params\.yaml and 1 more: ")


def test_unpushed_commit_is_refused_and_the_remote_of_the_branch_is_used(project: SharedRepository) -> None:
    run_git(project.clone, "commit", "-q", "--allow-empty", "-m", "another")
    refused(rf"^git remote origin has no commit {project.commit[:12]}: `git push origin` first$")
    run_git(project.clone, "push", "-q", "origin", "HEAD:refs/heads/a-branch")
    assert shared_places().commit == project.commit
    run_git(project.clone, "remote", "rename", "origin", "one")
    refused("^a cluster needs a git remote, and there is no origin: ")
    run_git(project.clone, "push", "-q", "-u", "one", "HEAD:main")
    assert shared_places().git_url == project.url


@pytest.mark.parametrize(
    ("uri", "remote", "config", "message"),
    [
        ("", "", "", "MLFLOW_TRACKING_URI: must name a tracking server that the cluster reaches, such as "),
        ("sqlite:////srv/mlflow.db", "", "", "MLFLOW_TRACKING_URI: must name a tracking server that the cluster"),
        ("http://h:5000", "https://ann:hunter22@host/x.git", "", "git remote origin: its address holds a password; "),
        ("http://h:5000", "/nowhere.git", "", "git remote origin: `git fetch` failed: .*nowhere.git' does not appear"),
        ("http://h:5000", "", "[core]\n", ".dvc/config: no default remote; `dvc remote add --default storage s3://"),
    ],
)
def test_place_that_a_cluster_cannot_use_is_one_line(
    uri: str, remote: str, config: str, message: str, project: SharedRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    if remote:
        run_git(project.clone, "remote", "set-url", "origin", remote)
    if config:
        (project.clone / ".dvc" / "config").write_text(config)
        run_git(project.clone, "commit", "-qam", "no remote")
        run_git(project.clone, "push", "-q", "origin", "HEAD:main")
    with pytest.raises(UserError, match=f"^{message}") as caught:
        shared_places()
    assert "hunter22" not in str(caught.value)


def test_local_places_need_no_remote(project: SharedRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    run_git(project.clone, "remote", "remove", "origin")
    places = local_places()
    assert places.git_url == str(project.clone / ".git")
    assert places.tracking_uri == f"sqlite:///{project.clone / 'mlflow.db'}"
    assert places.cache == str(project.clone / ".dvc" / "cache")


def test_missing_commit_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_git(tmp_path, "init", "-q")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^a cluster runs commits: this is no git repository with a commit$"):
        local_places()
