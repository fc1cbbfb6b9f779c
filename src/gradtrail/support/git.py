"""Runs git. Without git, or outside of a repository, every result is empty; any other failure of git is an error.

`strict_git` is for commands that must succeed, such as `git fetch`: every failure is an error.
"""

import io
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from gradtrail.support.errors import UserError
from gradtrail.support.shell import SECONDS, run

_TIMEOUT_SECONDS = 30
_NO_REPOSITORY = b"not a git repository"


class GitError(UserError):
    """A git command failed in a repository; the message is one line."""


def git(*arguments: str) -> str:
    """Return the stripped output of a git command; see `git_bytes`."""
    return git_bytes(*arguments).decode(errors="replace").strip()


def strict_git(*arguments: str, folder: Path | None = None, stdin: str = "", seconds: float = SECONDS) -> str:
    """Return the stripped output of a git command that must succeed.

    Args:
        arguments: Arguments of git.
        folder: Repository; the working folder by default.
        stdin: Text for standard input.
        seconds: Time limit.

    Raises:
        CommandError: Git failed or exceeded the limit.
    """
    return run(["git", *arguments], folder=folder, stdin=stdin, seconds=seconds)


def git_bytes(*arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
    """Return the output of a git command.

    It is empty if git is not installed, if there is no repository, and if git fails without a message, as
    `git rev-parse --verify --quiet` does.

    Args:
        arguments: Arguments of git.
        stdin: Input of git.
        env: Environment variables in addition to those of this process.

    Raises:
        GitError: git failed for another reason, such as a corrupt repository or one that another user owns; also if
            git finds no repository although there is a `.git`.
    """
    env = {**os.environ, "LC_ALL": "C", **(env or {})}
    try:
        result = subprocess.run(
            ["git", *arguments], input=stdin, capture_output=True, check=False, env=env, timeout=_TIMEOUT_SECONDS
        )
    except FileNotFoundError:
        return b""
    except subprocess.TimeoutExpired:
        raise GitError(f"`git {' '.join(arguments[:2])}` did not end within {_TIMEOUT_SECONDS} s") from None
    if result.returncode == 0:
        return result.stdout
    if not result.stderr or (_NO_REPOSITORY in result.stderr and not is_in_repository()):
        return b""
    reason = result.stderr.decode(errors="replace").splitlines()[0]
    raise GitError(f"`git {' '.join(arguments[:2])}` failed: {reason[:200]}")


def is_in_repository() -> bool:
    """Whether there is a `.git` here or above, on the same file system; if it is damaged, git sees no repository."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / ".git").exists():
            return True
        if folder.is_mount():
            break
    return False


def require_full_clone(folder: Path) -> None:
    """Refuse a shallow clone, in which DVC's queue and `dvc exp run --temp` end with 0 and keep no experiment."""
    if git("-C", str(folder), "rev-parse", "--is-shallow-repository") == "true":
        raise UserError(
            f"{folder}: a shallow clone, in which DVC keeps no experiment of its queue or of `dvc exp run --temp`; "
            "`git fetch --unshallow`, then run the same command again"
        )


def head_commit() -> str:
    """Return the hash of the commit that is checked out; empty if there is none."""
    return git("rev-parse", "--verify", "--quiet", "HEAD")


def blob_ids(commits: Iterable[str], path: str) -> list[str]:
    """Return the id of a file's content in each commit; empty if a commit lacks it.

    Args:
        commits: Hashes of the commits.
        path: Path relative to the working folder.
    """
    request = "".join(f"{commit}:./{path}\n" for commit in commits).encode()
    lines = git_bytes("cat-file", "--batch-check", stdin=request).decode().splitlines() if request else []
    return [line.split()[0] if line.split()[1:2] == ["blob"] else "" for line in lines]


def blobs(commit: str, paths: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of those files that a commit has.

    Args:
        commit: Hash of the commit.
        paths: Paths relative to the working folder.
    """
    names = list(paths)
    stream = io.BytesIO(
        git_bytes("cat-file", "--batch", stdin="".join(f"{commit}:./{path}\n" for path in names).encode())
    )
    contents: dict[str, bytes] = {}
    for path in names:
        head = stream.readline().split()
        if head[-1:] != [b"missing"] and len(head) == 3:
            content = stream.read(int(head[2]))
            stream.readline()  # the end of the line that the content is in
            contents |= {path: content} if head[1] == b"blob" else {}
    return contents
