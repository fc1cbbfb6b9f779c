"""Runs git and other programs whose failures are one line without credentials, and none of which asks a question."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradtrail.support.errors import UserError, one_line

SECONDS = 300.0  # that a command may take; clones and pushes of a repository without data take seconds
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


def git(*arguments: str, folder: Path | None = None, stdin: str = "", seconds: float = SECONDS) -> str:
    """Return what a git command prints, stripped.

    Args:
        arguments: of git.
        folder: the repository; the working folder by default.
        stdin: what it reads.
        seconds: that it may take.

    Raises:
        CommandError: git failed, or took longer.
    """
    return run(["git", *arguments], folder=folder, stdin=stdin, seconds=seconds)


def run(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    seconds: float | None = SECONDS,
) -> str:
    """Return what a command prints, stripped.

    Args:
        command: with its arguments.
        folder: where it runs; the working folder by default.
        stdin: what it reads.
        env: its whole environment; this process's by default.
        seconds: that it may take; None for no limit.

    Raises:
        CommandError: it failed, took longer, or is not installed.
    """
    env = _SSH | dict(os.environ if env is None else env) | _QUIET
    name = " ".join(command[:2])
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=env, text=True, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except FileNotFoundError as error:
        raise CommandError(f"`{name}`: {error.filename} is not there") from None
    with process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=seconds)
        except BaseException as error:
            # Its children as well: git's helper holds the pipes open for as long as its connection hangs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CommandError(f"`{name}` did not end within {seconds:.0f} s") from None
            raise
    if process.returncode:
        raise CommandError(f"`{name}` failed: {reason(stderr or stdout)}", stdout + stderr)
    return stdout.strip()


def reason(output: str) -> str:
    """Return the line of a failed command's output that says why: the last one that is more than a consequence."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if not any(sign in line for sign in _NO_REASON)] or lines or ["it said nothing"]
    return one_line(said[-1]).removeprefix("ERROR: ").removeprefix("fatal: ")[:_MOST_LINE]
