"""Experiments in git: refs in the shared repository, and their locks. A ref is created once: the first push wins."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradtrail.stages.common.params import parse_yaml
from gradtrail.stages.common.pipeline_file import parse_lock
from gradtrail.support.git import CommandError, strict_git


def experiment_ref(commit: str, name: str) -> str:
    """Return the ref by which DVC knows an experiment of a commit."""
    return f"refs/exps/{commit[:2]}/{commit[2:]}/{name}"


def committed_lock(commit: str, folder: Path | None = None) -> dict[str, Any]:
    """Return the stages of the `dvc.lock` of a commit, in a repository that is the working folder by default.

    Raises:
        CommandError: The repository lacks the commit or the file.
        UserError: The file is not a lock of DVC.
    """
    content = strict_git("show", f"{commit}:dvc.lock", folder=folder).encode()
    return parse_lock(parse_yaml(content, "dvc.lock"), "dvc.lock")


def read_refs(url: str, refs: Sequence[str]) -> dict[str, str]:
    """Return the values of those refs that exist in the repository at an address."""
    lines = strict_git("ls-remote", url, *refs).splitlines() if refs else []
    values = (line.split(maxsplit=1) for line in lines)
    return {ref: value for value, ref in values if ref in refs}


def create_ref(url: str, ref: str, value: str, folder: Path) -> bool:
    """Create a ref by a push that fails if the ref exists.

    Args:
        url: Address of the repository.
        ref: Full name of the ref.
        value: Commit that it names.
        folder: Repository that has the commit.

    Returns:
        True if the ref has this value now; False if it had another one.

    Raises:
        CommandError: The repository cannot be reached or refuses the push.
    """
    try:
        strict_git("push", "--quiet", f"--force-with-lease={ref}:", url, f"{value}:{ref}", folder=folder)
    except CommandError:
        current = read_refs(url, [ref])  # the push may have arrived although its answer was lost
        if ref not in current:
            raise
        return current[ref] == value
    return True
