"""The ref of an experiment is created once, and the first push wins."""

from pathlib import Path

import pytest
from cluster_repository import SharedRepository, run_git

from gradtrail.cluster.refs import create_ref, experiment_ref, read_refs
from gradtrail.support.shell import CommandError

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
