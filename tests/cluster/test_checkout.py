"""Checkouts of a node, refs of experiments, and the places that a cluster needs; mistakes are one line."""

from pathlib import Path

import pytest
from cluster_repository import SharedRepository, make_shared_repository, run_git

from gradtrail.cluster.checkout import node_folder
from gradtrail.cluster.places import local_places, shared_places
from gradtrail.cluster.refs import create_ref, experiment_ref, read_refs
from gradtrail.support.errors import UserError


def test_checkout_has_the_commit_and_is_clean_when_reused(shared: SharedRepository, tmp_path: Path) -> None:
    node = node_folder(shared.url)
    with node.checkout(shared.commit, None) as folder:
        assert (folder / "file").read_text() == "content"
        assert str(node.path / "cache") in (folder / ".dvc" / "config.local").read_text()
        (folder / "file").write_text("changed")
        (folder / "left").write_text("by a killed process")
        (folder / ".git" / "index.lock").touch()
        (folder / ".dvc" / "tmp" / "exps" / "standalone").mkdir(parents=True)
        run_git(folder, "update-ref", "refs/exps/ab/cd/name", "HEAD")
        first = folder
    with node.checkout(shared.commit, tmp_path / "own") as folder:
        assert folder == first
        assert run_git(folder, "status", "--porcelain") == ""
        assert not (folder / ".dvc" / "tmp" / "exps").exists()
        assert run_git(folder, "for-each-ref", "refs/exps") == ""
        assert str(tmp_path / "own") in (folder / ".dvc" / "config.local").read_text()
        assert run_git(folder, "config", "remote.origin.url") == shared.url


def test_two_processes_have_two_checkouts(shared: SharedRepository) -> None:
    node = node_folder(shared.url)
    with node.checkout(shared.commit, None) as one, node.checkout(shared.commit, None) as other:
        assert one != other
        assert (other / "file").is_file()


def test_later_commit_is_fetched_and_a_missing_one_is_one_line(shared: SharedRepository) -> None:
    node = node_folder(shared.url)
    node.require(shared.commit)
    (shared.clone / "file").write_text("second")
    run_git(shared.clone, "commit", "-qam", "second")
    with pytest.raises(UserError, match=rf"shared\.git: has no commit {shared.commit[:12]}: push it with `git push`$"):
        node.require(shared.commit)
    run_git(shared.clone, "push", "-q", "origin", "HEAD:main")
    with node.checkout(shared.commit, None) as folder:
        assert (folder / "file").read_text() == "second"


REF = experiment_ref("0" * 40, "gradtrail-1")


def test_ref_is_created_once(shared: SharedRepository) -> None:
    first = shared.commit
    run_git(shared.clone, "commit", "-q", "--allow-empty", "-m", "second")
    assert create_ref(shared.url, REF, first, shared.clone)
    assert not create_ref(shared.url, REF, shared.commit, shared.clone)
    assert create_ref(shared.url, REF, first, shared.clone), "a push whose answer was lost is repeated"
    assert read_refs(shared.url, [REF, f"{REF}-2"]) == {REF: first}


_PIPELINE = """
stages:
  train:
    cmd: python train.py
    deps: [data/in.txt, src/code]
    params: [train]
    outs: [models]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedRepository:
    """A clone whose commit is pushed, with a DVC remote and a tracking server."""
    shared = make_shared_repository(tmp_path / "git")
    (shared.clone / "dvc.yaml").write_text(_PIPELINE)
    (shared.clone / "params.yaml").write_text("train: 1\n")
    (shared.clone / "src" / "code").mkdir(parents=True)
    (shared.clone / "src" / "code" / "a.py").write_text("A = 1\n")
    (shared.clone / ".dvc" / "config").write_text(
        "[core]\n    remote = storage\n['remote \"storage\"']\n    url = s3://b/p\n"
    )
    run_git(shared.clone, "add", "-A")
    run_git(shared.clone, "commit", "-qm", "a pipeline")
    run_git(shared.clone, "push", "-q", "origin", "HEAD:main")
    monkeypatch.chdir(shared.clone)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://10.0.0.5:5000")
    return shared


def refused(message: str) -> None:
    with pytest.raises(UserError, match=message):
        shared_places()


def test_addresses_are_those_of_remotes_and_server(project: SharedRepository) -> None:
    places = shared_places()
    assert (places.commit, places.remote, places.git_url) == (project.commit, "origin", project.url)
    assert (places.tracking_uri, places.cache) == ("http://10.0.0.5:5000", None)


def test_uncommitted_changes_of_inputs_alone_are_refused(project: SharedRepository) -> None:
    (project.clone / "results").mkdir(exist_ok=True)
    (project.clone / "results" / "table.md").touch()
    (project.clone / "experiments.yaml").touch()
    (project.clone / "models").mkdir()
    (project.clone / "models" / "weights").touch()
    assert shared_places().commit == project.commit
    (project.clone / "params.yaml").write_text("train: 2\n")
    refused(r"^uncommitted changes in params\.yaml: a cluster runs commits; commit them, or `git stash` them$")
    for number in range(5):
        (project.clone / "src" / "code" / f"new{number}.py").touch()
    refused(r"^uncommitted changes in params\.yaml, src/code/new0\.py, src/code/new1\.py and 3 more: ")


def test_unpushed_commit_and_unreachable_remote_are_refused(project: SharedRepository, tmp_path: Path) -> None:
    run_git(project.clone, "commit", "-q", "--allow-empty", "-m", "another")
    refused(rf"^git remote origin has no commit {project.commit[:12]}: `git push origin` first$")
    run_git(project.clone, "push", "-q", "origin", "HEAD:refs/heads/a-branch")
    assert shared_places().commit == project.commit
    project.bare.rename(tmp_path / "away")
    refused(r"^git remote origin: `git fetch` failed: .*shared\.git' does not appear to be a git repository$")


def test_only_remote_is_used_and_none_or_several_are_refused(project: SharedRepository) -> None:
    run_git(project.clone, "remote", "rename", "origin", "one")
    assert shared_places().remote == "one"
    run_git(project.clone, "remote", "add", "two", project.url)
    refused(r"^a cluster needs a git remote that it can reach: it has one, two, and the branch tracks none; ")
    for name in ("one", "two"):
        run_git(project.clone, "remote", "remove", name)
    refused(r"^a cluster needs a git remote that it can reach: it has none; ")


@pytest.mark.parametrize("uri", ["", "sqlite:////srv/mlflow.db"])
def test_local_store_is_refused(project: SharedRepository, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    refused(r"^MLFLOW_TRACKING_URI: must name a tracking server that the cluster reaches, such as ")


def test_password_in_the_address_of_the_git_remote_is_refused_and_not_printed(project: SharedRepository) -> None:
    run_git(project.clone, "remote", "set-url", "origin", "https://ann:hunter22@host/x.git")
    with pytest.raises(UserError, match=r"^git remote origin: its address holds a password; ") as caught:
        shared_places()
    assert "hunter22" not in str(caught.value)


def test_missing_dvc_remote_is_one_line_with_the_command_to_add_one(project: SharedRepository) -> None:
    (project.clone / ".dvc" / "config").write_text("[core]\n    analytics = false\n")
    run_git(project.clone, "commit", "-qam", "no remote")
    run_git(project.clone, "push", "-q", "origin", "HEAD:main")
    refused(r"^\.dvc/config: no default remote in the commit; `dvc remote add --default storage s3://")


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
