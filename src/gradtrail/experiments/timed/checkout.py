"""Revisions of the code in git worktrees below `.gradtrail/timed/`, removed when the block ends, however it ends."""

import ast
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from gradtrail.stages.common.overrides import PARAMS, changed, flatten
from gradtrail.stages.common.params import read_yaml
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.git import GitError, git, git_bytes
from gradtrail.support.paths import private_folder
from gradtrail.tracking.mlflow.tags import CUT_OFF, shown

_SECTIONS = ("train.", "environment.")  # of params.yaml, which the compiled training depends on


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield an empty folder of this process; remove it, worktrees in it, and what killed processes left."""
    above = private_folder() / "timed"
    above.mkdir(exist_ok=True)
    for left in above.iterdir():
        is_other = left.name.isdecimal() and int(left.name) != os.getpid()  # ours is that of a killed process
        if not (is_other and psutil.pid_exists(int(left.name))):
            _remove(left)
    folder = above / str(os.getpid())
    folder.mkdir()
    try:
        yield folder
    finally:
        _remove(folder)


def check_out(name: str, commit: str, into: Path, diff: str = "") -> Path:
    """Make a worktree of a commit, with uncommitted changes applied; return the project's folder in it.

    Args:
        name: for errors.
        commit: its hash.
        into: a folder that does not exist, in one of `scratch`.
        diff: an artifact `git.diff`, or nothing.

    Raises:
        UserError: the commit or the changes are not to be had; one line.
    """
    if any(line.startswith(CUT_OFF) for line in diff.splitlines()):
        raise UserError(f"{name}: its git.diff was too large to be stored whole, so its code is not known")
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
    """Make the training's params in a worktree those that a run recorded, as texts by dotted key."""
    params = read_yaml(folder / PARAMS)
    found = {
        key: _value(recorded[key])
        for key, value in flatten(params).items()
        if key.startswith(_SECTIONS) and key in recorded and shown(value) != recorded[key]
    }
    if found:
        (folder / PARAMS).write_text(json.dumps(changed(params, found), indent=2), encoding="utf-8")


def _value(text: str) -> Any:
    """Return the value that `shown` wrote."""
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
