"""Asks git, where there is git."""

import io
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


def blobs(commit: str, paths: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of files in a commit, of those that it has.

    Args:
        commit: its hash.
        paths: relative to the working folder.
    """
    wanted = list(paths)
    stream = io.BytesIO(
        git_bytes("cat-file", "--batch", stdin="".join(f"{commit}:./{path}\n" for path in wanted).encode())
    )
    found: dict[str, bytes] = {}
    for path in wanted:
        head = stream.readline().split()
        if head[-1:] != [b"missing"] and len(head) == 3:
            content = stream.read(int(head[2]))
            stream.readline()  # the end of the line that the content stands in
            found |= {path: content} if head[1] == b"blob" else {}
    return found
