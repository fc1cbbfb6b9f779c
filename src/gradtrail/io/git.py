"""Asks git, where there is git."""

import subprocess
from collections.abc import Iterable


def git(*arguments: str) -> str:
    """Return what a git command prints, stripped; empty where it fails or git is not installed."""
    return git_bytes(*arguments).decode(errors="replace").strip()


def git_bytes(*arguments: str, stdin: bytes = b"") -> bytes:
    """Return what a git command prints, as it is; empty where it fails or git is not installed."""
    try:
        result = subprocess.run(["git", *arguments], input=stdin, capture_output=True, check=False)
    except OSError:
        return b""
    return result.stdout if result.returncode == 0 else b""


def blob_ids(commits: Iterable[str], path: str) -> list[str]:
    """Return the id of a file's content in each commit; empty where a commit lacks it.

    Args:
        commits: their hashes.
        path: relative to the working folder.
    """
    asked = "".join(f"{commit}:./{path}\n" for commit in commits).encode()
    lines = git_bytes("cat-file", "--batch-check", stdin=asked).decode().splitlines() if asked else []
    return [line.split()[0] if line.split()[1:2] == ["blob"] else "" for line in lines]
