"""Runs git and other programs, without prompts.

`git` and the functions that use it return nothing without git or outside of a repository. Every other failure of a
program is a `CommandError`; `run` and `strict_git` are for programs that must succeed.
"""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gradtrail.support.errors import UserError, one_line

SECONDS = 300.0  # default time limit: clones and pushes of a repository without data take seconds
_LOCAL_SECONDS = 30.0  # time limit of `git`, which reads the repository
_NO_REPOSITORY = "not a git repository"
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
    """A program failed; the message is one line, and `output` is everything that it printed."""

    def __init__(self, message: str, output: str = ""):
        super().__init__(message)
        self.output = output


def run(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    seconds: float | None = SECONDS,
) -> bytes:
    """Return the output of a program that must succeed; `env` is its complete environment.

    Raises:
        CommandError: The program failed, exceeded the time limit, or is not installed.
    """
    name, pipe = " ".join(command[:2]), subprocess.PIPE
    env = _SSH | dict(os.environ if env is None else env) | _QUIET
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except FileNotFoundError as error:
        raise CommandError(f"`{name}`: {error.filename} is not installed") from None
    with process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=seconds)
        except BaseException as error:
            # Kill its children too: git's helper holds the pipes open while its connection hangs
            with contextlib.suppress(ProcessLookupError, PermissionError):  # on macOS the latter, if all have ended
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                message = f"`{name}` did not end within {seconds:.0f} s"
                raise CommandError(message, message) from None
            raise
    if process.returncode:
        why = (stderr or stdout).decode(errors="replace")
        raise CommandError(f"`{name}` failed: {reason(why)}", (stdout + stderr).decode(errors="replace"))
    return stdout


def strict_git(*arguments: str, folder: Path | None = None, seconds: float = SECONDS) -> str:
    """Return the stripped output of a git command that must succeed."""
    return run(["git", *arguments], folder=folder, seconds=seconds).decode(errors="replace").strip()


def git(*arguments: str) -> str:
    """Return the stripped output of a git command; see `git_bytes`."""
    return git_bytes(*arguments).decode(errors="replace").strip()


def git_bytes(*arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
    """Return the output of a git command; `env` is in addition to this process's environment.

    It is empty if git is not installed, if there is no repository, and if git fails without a message, as
    `git rev-parse --verify --quiet` does. Any other failure is a `CommandError`, such as a corrupt repository, or one
    of another user; also if git finds no repository although there is a `.git`.
    """
    try:
        return run(["git", *arguments], env=os.environ | dict(env or {}), stdin=stdin, seconds=_LOCAL_SECONDS)
    except CommandError as error:
        if not error.output or (_NO_REPOSITORY in error.output and not is_in_repository()):
            return b""
        raise


def unpack(commit: str, into: Path, *paths: str, folder: str = ".") -> None:
    """Unpack files of a commit, all below `folder` by default, without their modes; raise CommandError if it has none.

    Not by tarfile: its filters are missing in the Python of Debian 12, and required by newer ones.
    """
    content = git_bytes("-C", folder, "archive", "--format=zip", commit, "--", *paths)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(into)


def reason(output: str) -> str:
    """Return the line of a failed program's output that explains the failure: the last one that is no consequence."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reasons = [line for line in lines if not any(part in line for part in _CONSEQUENCES)] or lines or ["no output"]
    return one_line(reasons[-1]).removeprefix("ERROR: ").removeprefix("fatal: ")[:_LONGEST_LINE]


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


def with_interpreter(python: Path = Path(sys.executable)) -> dict[str, str]:
    """Return this process's environment with an interpreter first on the path, for DVC, its workers and the stages."""
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": str(python.parent.parent)}


def is_in_repository() -> bool:
    """Whether there is a `.git` here or above; if it is damaged, git sees no repository."""
    return any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents))


def require_full_clone(folder: Path) -> None:
    """Refuse a shallow clone, in which DVC's queue and `dvc exp run --temp` end with 0 and keep no experiment."""
    if git("-C", str(folder), "rev-parse", "--is-shallow-repository") == "true":
        raise UserError(
            f"{folder}: a shallow clone, in which DVC keeps no experiment of its queue or of `dvc exp run --temp`; "
            "`git fetch --unshallow`, then run the same command again"
        )


def head_commit() -> str:
    """Return the hash of the commit that is checked out; empty if there is none."""
    return git("rev-parse", "--verify", "--quiet", "HEAD")


def blob_ids(commits: Iterable[str], path: str) -> list[str]:
    """Return the id of a file's content in each commit, empty if it lacks it; the path is relative to this folder."""
    request = "".join(f"{commit}:./{path}\n" for commit in commits).encode()
    lines = git_bytes("cat-file", "--batch-check", stdin=request).decode().splitlines() if request else []
    return [line.split()[0] if line.split()[1:2] == ["blob"] else "" for line in lines]


def blobs(commit: str, paths: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of those files that a commit has; paths are relative to the working folder."""
    names = list(paths)
    request = "".join(f"{commit}:./{path}\n" for path in names).encode()
    stream = io.BytesIO(git_bytes("cat-file", "--batch", stdin=request))
    contents = {}
    for path in names:
        match stream.readline().split():
            case [_, kind, size] if size != b"missing":
                content = stream.read(int(size))
                stream.readline()  # the end of the line that the content is in
                if kind == b"blob":
                    contents[path] = content
    return contents
