"""Checkouts of a node: clean, one for each process at a time, made once and reused."""

from pathlib import Path

import pytest
from cluster_repository import SharedRepository, run_git

from gradtrail.cluster.checkout import node_folder
from gradtrail.cluster.refs import create_ref, experiment_ref, read_refs
from gradtrail.support.errors import UserError
from gradtrail.support.shell import CommandError


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


def test_unreachable_remote_is_one_line(shared: SharedRepository, tmp_path: Path) -> None:
    url = str(tmp_path / "nothing.git")
    with pytest.raises(CommandError, match=r"^`git ls-remote` failed: .*nothing\.git"):
        read_refs(url, [REF])
    with pytest.raises(CommandError, match=r"^`git ls-remote` failed: .*nothing\.git"):
        create_ref(url, REF, shared.commit, shared.clone)
