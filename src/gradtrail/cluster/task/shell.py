"""Runs git and other programs whose failures are one line without credentials, and none of which asks a question."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradtrail.support.errors import UserError, one_line

_SECONDS = 300.0  # that a command may take; clones and pushes of a repository without data take seconds
_MOST_LINE = 300  # characters of an error
_QUIET = {
    "GIT_TERMINAL_PROMPT": "0",  # wrong credentials are an error, not a question that nobody sees
    "GIT_ASKPASS": "true",
    "LC_ALL": "C",
}
_SSH = {"GIT_SSH_COMMAND": "ssh -o BatchMode=yes"}
_NO_REASON = (  # parts of lines that only follow from another line
    *("hint:", "failed to push some refs", "Could not read from remote", "correct access rights", "repository exists."),
    *("failed to reproduce", "Having any troubles?"),
)


class CommandError(UserError):
    """A command failed; the message is one line, and `output` all that it printed."""

    def __init__(self, message: str, output: str = ""):
        super().__init__(message)
        self.output = output


def git(*arguments: str, folder: Path | None = None, stdin: str = "") -> str:
    """Return what a git command prints, stripped.

    Args:
        arguments: of git.
        folder: the repository; the working folder by default.
        stdin: what it reads.

    Raises:
        CommandError: git failed, or took longer than five minutes.
    """
    return run(["git", *arguments], folder=folder, stdin=stdin)


def run(
    command: Sequence[str], *, folder: Path | None = None, stdin: str = "", env: Mapping[str, str] | None = None
) -> str:
    """Return what a command prints, stripped; `env` is its whole environment where it is given.

    Raises:
        CommandError: it failed, took longer than five minutes, or is not installed.
    """
    own = dict(os.environ if env is None else env)
    env = _SSH | own | _QUIET
    name = " ".join(command[:2])
    try:
        done = subprocess.run(
            command, cwd=folder, input=stdin, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"`{name}` did not end within {_SECONDS:.0f} s") from None
    except FileNotFoundError as error:
        raise CommandError(f"`{name}`: {error.filename} is not there") from None
    if done.returncode:
        raise CommandError(f"`{name}` failed: {reason(done.stderr or done.stdout)}", done.stdout + done.stderr)
    return done.stdout.strip()


def reason(output: str) -> str:
    """Return the line of a failed command's output that says why: the last one that is more than a consequence."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if not any(sign in line for sign in _NO_REASON)] or lines or ["it said nothing"]
    return one_line(said[-1]).removeprefix("ERROR: ").removeprefix("fatal: ")[:_MOST_LINE]
