"""Revisions of the code in git worktrees below `.gradtrail/timed/`, which are removed at the end of the block."""

import ast
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from gradtrail.stages.common.params import PARAMS, changed, flatten, read_yaml
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.git import GitError, git, git_bytes
from gradtrail.support.paths import private_folder
from gradtrail.tracking.mlflow.tags import CUT_OFF, param_text

_SECTIONS = ("train.", "environment.")  # sections of params.yaml that the compiled training depends on


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield an empty folder of this process; remove it, its worktrees, and the folders of killed processes."""
    above = private_folder() / "timed"
    above.mkdir(exist_ok=True)
    for old in above.iterdir():
        is_other = (
            old.name.isdecimal() and int(old.name) != os.getpid()
        )  # a folder with our number is of a killed process
        if not (is_other and psutil.pid_exists(int(old.name))):
            _remove(old)
    folder = above / str(os.getpid())
    folder.mkdir()
    try:
        yield folder
    finally:
        _remove(folder)


def check_out(name: str, commit: str, into: Path, diff: str = "") -> Path:
    """Make a worktree of a commit, with uncommitted changes applied; return the project's folder in it.

    Args:
        name: Name of the side in errors.
        commit: Hash of the commit.
        into: New folder below that of `scratch`.
        diff: Artifact `git.diff`; empty for none.

    Raises:
        UserError: The commit or the changes are not available.
    """
    if any(line.startswith(CUT_OFF) for line in diff.splitlines()):
        raise UserError(f"{name}: its git.diff was too large to be stored, so its code is unknown")
    try:
        git("worktree", "add", "--detach", "--force", str(into), commit or "(none)")
        if "diff --git " in diff:
            git_bytes("-C", str(into), "apply", "--whitespace=nowarn", stdin=diff.encode())
    except GitError as error:
        raise UserError(f"{name}: commit {commit[:12] or 'unknown'} cannot be checked out: {one_line(error)}") from None
    folder = into / git("rev-parse", "--show-prefix")
    if not (folder / "src/gradtrail").is_dir():
        raise UserError(f"{name}: commit {commit[:12] or 'unknown'} has no src/gradtrail")
    return folder


def write_params(folder: Path, recorded: Mapping[str, str]) -> None:
    """Set the training's params in a worktree to those of a run, given as texts by dotted key."""
    params = read_yaml(folder / PARAMS)
    changes = {
        key: _value(recorded[key])
        for key, value in flatten(params).items()
        if key.startswith(_SECTIONS) and key in recorded and param_text(value) != recorded[key]
    }
    if changes:
        (folder / PARAMS).write_text(json.dumps(changed(params, changes), indent=2), encoding="utf-8")


def _value(text: str) -> Any:
    """Return the value of a text that `param_text` returned."""
    if text == "null":
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _remove(folder: Path) -> None:
    for inside in folder.iterdir() if folder.is_dir() else ():
        if (inside / ".git").is_file():
            with contextlib.suppress(GitError):
                git("worktree", "remove", "--force", "--force", str(inside))
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(GitError):
        git("worktree", "prune")
