"""No git and no repository are empty answers; any other failure of git or of a command is one line without secrets."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradtrail.support.git import CommandError, blob_ids, blobs, git, head_commit, reason, run, strict_git


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, and the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / "code").mkdir()
    for name in ("code/a.py", "code/b c.py", "other.txt"):
        (tmp_path / name).write_text(name)
    subprocess.run(["git", "add", "-A"], check=True)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"], check=True)
    return tmp_path


def test_without_git_or_a_repository_every_answer_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (git("status"), head_commit(), blob_ids(["HEAD"], "a"), blobs("HEAD", ["a"])) == ("", "", [], {})
    subprocess.run(["git", "init", "-q"], check=True)
    assert (head_commit(), git("rev-list", "--all")) == ("", ""), "no commit"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (git("status"), head_commit()) == ("", "")


@pytest.mark.parametrize("damaged", ["a folder", "a file"])
def test_damaged_repository_is_an_error(damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its `HEAD` is missing, git says that there is no repository."""
    (below := tmp_path / "below").mkdir()
    monkeypatch.chdir(below)
    if damaged == "a file":
        (tmp_path / ".git").write_text("gitdir: /nowhere\n")
    else:
        subprocess.run(["git", "init", "-q", ".."], check=True)
        (tmp_path / ".git/HEAD").unlink()
    with pytest.raises(CommandError, match=r"^`git rev-parse` failed: not a git repository"):
        git("rev-parse", "--git-dir")


def test_contents_of_a_commit(repository: Path) -> None:
    head = head_commit()
    assert blobs(head, ["code/b c.py", "code", "none"]) == {"code/b c.py": b"code/b c.py"}
    assert blob_ids([head], "none") == [""]


@pytest.mark.parametrize(
    ("file", "content", "message"), [("index", b"no index", "`git status` failed"), ("config", b"[", "bad config")]
)
def test_a_damaged_repository_is_one_line(repository: Path, file: str, content: bytes, message: str) -> None:
    (repository / ".git" / file).write_bytes(content)
    with pytest.raises(CommandError, match=message) as caught:
        git("status")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("", "no output"),
        ("one\n\ntwo\n", "two"),
        ("fatal: no such thing\nfatal: Could not read from remote repository.\n", "no such thing"),
        ("train: train.seed must be\nERROR: failed to reproduce 'train': exited with 2\n", "train: train.seed must be"),
        (
            "ERROR: unexpected error - Unable to locate credentials\n\nHaving any troubles? Hit us up\n",
            "unexpected error - Unable to locate credentials",
        ),
        ("ERROR: failed to reproduce 'train'\n", "failed to reproduce 'train'"),
    ],
)
def test_reason_is_the_last_line_that_is_no_consequence(output: str, why: str) -> None:
    assert reason(output) == why


def test_command_returns_its_output_or_fails_in_one_line_without_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run([sys.executable, "-c", "print(input())"], stdin=b"words") == b"words\n"
    monkeypatch.setenv("SOME_TOKEN", "very-secret")
    failing = "import os, sys; sys.exit('denied for ' + os.environ['SOME_TOKEN'])"
    with pytest.raises(CommandError, match=r"failed: denied for \*\*\*$") as caught:
        run([sys.executable, "-c", failing])
    assert "\n" not in str(caught.value)
    with pytest.raises(CommandError, match=r"`no-such-program x`: no-such-program is not installed"):
        run(["no-such-program", "x"])


def test_git_does_not_prompt(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"^`git clone` failed: "):
        strict_git("clone", "https://127.0.0.1:9/private.git", str(tmp_path / "x"))


def test_hanging_command_is_killed_with_its_children() -> None:
    began = time.monotonic()
    with pytest.raises(CommandError, match=r"^`sh -c` did not end within 0 s$"):
        run(["sh", "-c", "sleep 30 & wait"], seconds=0.2)
    assert time.monotonic() - began < 15


def test_timeout_is_reported_if_all_processes_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then macOS refuses to signal the group: all in it wait to be reaped."""
    kill = os.killpg

    def refuse(group: int, number: int) -> None:
        kill(group, number)
        raise PermissionError

    monkeypatch.setattr(os, "killpg", refuse)
    with pytest.raises(CommandError, match="did not end within"):
        run(["sleep", "30"], seconds=0.2)
