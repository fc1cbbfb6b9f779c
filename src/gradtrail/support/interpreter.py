"""Interpreters of Python and their environments."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from gradtrail.support.errors import UserError, one_line
from gradtrail.support.shell import CommandError, run


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


def uv(*arguments: str) -> None:
    """Run uv with the index of pip; raise UserError, without index addresses, if it fails."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    address = subprocess.run(command, capture_output=True, check=False, text=True).stdout.strip()
    index = {"UV_DEFAULT_INDEX": address} if address else {}
    try:
        run([str(Path(sys.executable).with_name("uv")), *arguments], env=index | dict(os.environ), seconds=None)
    except CommandError as error:
        plain = re.sub(r"[a-z+]+://\S+", "(an index)", error.output or str(error))
        raise UserError(f"uv: {one_line(re.sub(r'[×╰─▶├│]', '', plain))[:400]}") from None
