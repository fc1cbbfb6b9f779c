"""Interpreters of Python: the one that a user names, and the one that DVC, its workers and the stages find."""

import os
import shutil
import sys
from pathlib import Path

from gradtrail.support.errors import UserError


def with_this_interpreter() -> dict[str, str]:
    """Return the environment of this process, with its own interpreter first on the path."""
    return with_interpreter(Path(sys.executable))


def with_interpreter(python: Path) -> dict[str, str]:
    """Return the environment of this process, with an interpreter first on the path."""
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": str(python.parent.parent)}


def find_interpreter(python: str | None, folder: Path, option: str) -> Path:
    """Return the absolute path of an interpreter; None stands for this one.

    Args:
        python: Path relative to `folder`, or a command.
        folder: Folder in which the user ran the command.
        option: Option to name in errors.

    Raises:
        UserError: There is no such interpreter.
    """
    if python is None:
        return Path(sys.executable)
    path = shutil.which(folder / python if os.sep in python else python)
    if path is None:
        raise UserError(f"{option}: no interpreter of Python at {python!r} that can be run")
    return Path(path).absolute()  # not resolved: Python finds its environment by the link
