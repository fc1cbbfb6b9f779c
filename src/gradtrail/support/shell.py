"""Runs programs without prompts; a failure is one line without credentials."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradtrail.support.errors import UserError, one_line

SECONDS = 300.0  # default time limit: clones and pushes of a repository without data take seconds
_LONGEST_LINE = 300  # characters of an error
_QUIET = {
    "GIT_TERMINAL_PROMPT": "0",  # wrong credentials are an error, not an invisible prompt
    "GIT_ASKPASS": "true",
    "LC_ALL": "C",
}
_SSH = {"GIT_SSH_COMMAND": "ssh -o BatchMode=yes"}
_CONSEQUENCES = (  # parts of lines that follow from an error and do not explain it
    *("hint:", "failed to push some refs", "Could not read from remote", "correct access rights", "repository exists."),
    *("failed to reproduce", "Having any troubles?"),
)


class CommandError(UserError):
    """A command failed; the message is one line, and `output` is everything that it printed."""

    def __init__(self, message: str, output: str = ""):
        super().__init__(message)
        self.output = output


def run(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    seconds: float | None = SECONDS,
) -> str:
    """Return the output of a command, stripped.

    Args:
        command: Program and arguments.
        folder: Working folder of the command; this process's by default.
        stdin: Text for standard input.
        env: Complete environment; this process's by default.
        seconds: Time limit; None for no limit.

    Raises:
        CommandError: The command failed, exceeded the limit, or is not installed.
    """
    env = _SSH | dict(os.environ if env is None else env) | _QUIET
    name = " ".join(command[:2])
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=env, text=True, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except FileNotFoundError as error:
        raise CommandError(f"`{name}`: {error.filename} is not installed") from None
    with process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=seconds)
        except BaseException as error:
            # Kill its children too: git's helper holds the pipes open while its connection hangs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CommandError(f"`{name}` did not end within {seconds:.0f} s") from None
            raise
    if process.returncode:
        raise CommandError(f"`{name}` failed: {reason(stderr or stdout)}", stdout + stderr)
    return stdout.strip()


def reason(output: str) -> str:
    """Return the line of a failed command's output that explains the failure: the last one that is no consequence."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reasons = [line for line in lines if not any(part in line for part in _CONSEQUENCES)] or lines or ["no output"]
    return one_line(reasons[-1]).removeprefix("ERROR: ").removeprefix("fatal: ")[:_LONGEST_LINE]
