"""Worktrees of revisions, with uncommitted changes and recorded params; none stays, whatever happens."""

import os
from pathlib import Path

import pytest
from cluster_repository import run_git

from gradtrail.experiments.timed.checkout import check_out, scratch, write_params
from gradtrail.stages.common.params import read_yaml
from gradtrail.support.errors import UserError
from gradtrail.tracking.mlflow.tags import CUT_OFF

PARAMS = """train:
  epochs: 3
  clip_norm: 1.0
  average_decay: null
  mlp: {hidden: [32], dropout: 0.0}
environment: {xla_flags: []}
runtime: {trace: false}
"""


def git(*arguments: str) -> str:
    return run_git(Path(), *arguments)


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit, the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    Path("src/gradtrail").mkdir(parents=True)
    Path("src/gradtrail/a.py").write_text("A = 1\n")
    Path("params.yaml").write_text(PARAMS)
    Path(".gitignore").write_text(".gradtrail\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    return tmp_path


def worktrees() -> list[str]:
    return git("worktree", "list").splitlines()[1:]


def test_worktree_has_the_code_with_its_changes_and_is_removed() -> None:
    commit = git("rev-parse", "HEAD")
    Path("src/gradtrail/a.py").write_text("A = 2\n")
    diff = git("diff") + "\n"
    with scratch() as folder:
        plain, edited = check_out("A", commit, folder / "A"), check_out("B", commit, folder / "B", diff)
        assert (plain / "src/gradtrail/a.py").read_text() == "A = 1\n"
        assert (edited / "src/gradtrail/a.py").read_text() == "A = 2\n"
        assert len(worktrees()) == 2
    assert worktrees() == []
    assert not folder.exists()


def test_missing_commit_or_changes_are_one_line_and_leave_nothing() -> None:
    head = git("rev-parse", "HEAD")
    for commit, diff, words in (
        ("0" * 40, "", "A: commit 000000000000 cannot be checked out: "),
        ("", "", "A: commit unknown cannot be checked out: "),
        (head, "diff --git a/x b/x\nnonsense\n", "cannot be checked out: `git -C"),
        (head, f"{CUT_OFF}: a file\n", "A: its git.diff was too large"),
    ):
        with pytest.raises(UserError, match=words) as raised, scratch() as folder:
            check_out("A", commit, folder / "A", diff)
        assert "\n" not in str(raised.value)
    assert worktrees() == []


def test_worktrees_of_killed_processes_are_removed() -> None:
    left = Path(".gradtrail/timed/999999999/A")  # no process has this number
    left.parent.mkdir(parents=True)
    git("worktree", "add", "--detach", str(left), "HEAD")
    with scratch() as folder:
        assert folder.name == str(os.getpid())
        assert not left.exists()
        assert worktrees() == []


def test_params_are_those_of_the_run(repository: Path) -> None:
    recorded = {
        "train.epochs": "5",
        "train.clip_norm": "null",
        "train.average_decay": "0.99",
        "train.mlp.hidden": "[64, 32]",
        "environment.xla_flags": "['--xla_a=1']",
        "train.unknown": "1",
        "runtime.trace": "True",
    }
    write_params(repository, recorded)
    params = read_yaml(repository / "params.yaml")
    assert params["train"] == {
        "epochs": 5,
        "clip_norm": None,
        "average_decay": 0.99,
        "mlp": {"hidden": [64, 32], "dropout": 0.0},
    }
    assert params["environment"] == {"xla_flags": ["--xla_a=1"]}
    assert params["runtime"] == {"trace": False}
