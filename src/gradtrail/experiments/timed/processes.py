"""The two processes of a timed comparison. They live at the same time, and only one of them works at a time."""

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from gradtrail.support.errors import UserError, one_line

_WORKER = Path(__file__).with_name("worker.py")
_LONGEST_BUILD, _LONGEST_BURST = 600.0, 120.0  # seconds after which a process counts as hanging
_LONGEST_LINE = 300  # characters


@dataclass(frozen=True, kw_only=True)
class Job:
    """The training that a process compiles and times."""

    source: str  # folder to import from: `src` of a revision
    folder: str  # working folder, with the `params.yaml` to use
    cache: str  # folder of compiled programs, so that later processes of this side need not compile
    examples: int  # number of training examples, whose pixels are random
    image_shape: tuple[int, int]  # height and width in pixels
    classes: int
    cores: tuple[int, ...]  # cores to run on; empty if the system cannot restrict them
    programs: str | None = None  # folder for the optimized HLO of its functions; None to write none


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of the two sides: a job and its interpreter."""

    name: str  # name in errors, such as `A` or a commit
    python: Path
    job: Job


class Worker:
    """A running process of a side. `ready` must be called before the first burst."""

    def __init__(self, program: Program, process: "subprocess.Popen[bytes]", errors: IO[bytes]):
        self._program, self._process, self._errors = program, process, errors
        self._stdin: Any = process.stdin  # pipes, both
        self._stdout: Any = process.stdout
        self._rest = b""
        self.steps_per_epoch = 0

    def ready(self) -> None:
        """Wait until everything is compiled; raise UserError, with the last line of the process, if it fails."""
        self.steps_per_epoch = int(self._answer(_LONGEST_BUILD).split()[1])

    def run(self, steps: int) -> float:
        """Return the seconds of a number of optimizer steps."""
        with contextlib.suppress(BrokenPipeError):  # `_answer` raises the reason
            self._stdin.write(f"run {steps}\n".encode())
        return float(self._answer(_LONGEST_BURST))

    def _answer(self, seconds: float) -> str:
        ends = time.monotonic() + seconds
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._stdout], [], [], max(0.0, ends - time.monotonic()))
            if not readable:
                raise UserError(f"{self._program.name}: its process did not answer within {seconds:.0f} s")
            part = self._stdout.read(4096)
            if not part:
                raise UserError(f"{self._program.name}: {self._failure()}")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _failure(self) -> str:
        """Return the exit status and the last line of stderr of a process that ended."""
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        message = one_line(lines[-1])[:_LONGEST_LINE] if lines else "no message"
        return f"its process ended with exit status {status}: {message}"


@contextlib.contextmanager
def running(programs: Mapping[str, Program]) -> Iterator[dict[str, Worker]]:
    """Start a process per side, in parallel, and yield them once all have compiled; kill them in the end.

    Raises:
        UserError: An interpreter cannot be started, or a program does not compile.
    """
    with contextlib.ExitStack() as stack:
        workers = {side: stack.enter_context(_process(program)) for side, program in programs.items()}
        for worker in workers.values():
            worker.ready()
        yield workers


@contextlib.contextmanager
def _process(program: Program) -> Iterator[Worker]:
    keep = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSTARTUP")}
    command = [str(program.python), "-u", str(_WORKER), json.dumps(asdict(program.job))]
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, bufsize=0, stdin=pipe, stdout=pipe, stderr=errors, env=keep, start_new_session=True, cwd="/"
            )
        except OSError as error:
            raise UserError(f"{program.name}: {program.python} cannot be started: {error.strerror}") from None
        try:
            yield Worker(program, process, errors)
        finally:
            process.kill()
            process.communicate()  # closes the pipes


def cores() -> tuple[int, ...]:
    """Return the cores that this process may use; empty if the system cannot restrict them."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
