"""No git and no repository are empty answers; any other failure of git is one line."""

import subprocess
from pathlib import Path

import pytest

from gradtrail.support.git import GitError, blob_ids, blobs, files_below, git, head_commit


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
    commit("first")
    return tmp_path


def commit(message: str) -> None:
    subprocess.run(["git", "add", "-A"], check=True)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", message], check=True)


def test_without_git_or_a_repository_every_answer_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (git("status"), head_commit(), blob_ids(["HEAD"], "a"), blobs("HEAD", ["a"])) == ("", "", [], {})
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
    with pytest.raises(GitError, match=r"^`git rev-parse --git-dir` failed: fatal: not a git repository"):
        git("rev-parse", "--git-dir")


def test_no_commit_is_an_empty_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    assert (head_commit(), git("rev-list", "--all")) == ("", "")


def test_contents_of_a_commit(repository: Path) -> None:
    head = head_commit()
    assert blobs(head, ["code/b c.py", "code", "none"]) == {"code/b c.py": b"code/b c.py"}
    assert blob_ids([head], "none") == [""]
    assert files_below(head, "code") == ["code/a.py", "code/b c.py"]
    assert files_below(head, "cod") == []


@pytest.mark.parametrize(
    ("file", "content", "message"), [("index", b"no index", "`git status` failed"), ("config", b"[", "bad config")]
)
def test_a_damaged_repository_is_one_line(repository: Path, file: str, content: bytes, message: str) -> None:
    (repository / ".git" / file).write_bytes(content)
    with pytest.raises(GitError, match=message) as caught:
        git("status")
    assert "\n" not in str(caught.value)
