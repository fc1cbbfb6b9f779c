"""The two processes of a timed comparison: started together, alive together, and only one of them at work at a time."""

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
_LONGEST_BUILD, _LONGEST_BURST = 600.0, 120.0  # seconds, beyond which a process is taken to hang
_LONGEST_LINE = 300  # characters


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process compiles and times.

    Attributes:
        source: the folder on the path, `src` of a revision.
        folder: the working folder, whose `params.yaml` counts.
        cache: folder of compiled programs, so that a second process of this side need not compile again.
        examples: number of training examples; their pixels are random.
        image_shape: height and width in pixels.
        classes: number of classes.
        cores: that it may use; none where the system cannot say.
        programs: folder for the optimized HLO of its functions; None to keep none.
    """

    source: str
    folder: str
    cache: str
    examples: int
    image_shape: tuple[int, int]
    classes: int
    cores: tuple[int, ...]
    programs: str | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of the two sides: a job and who does it.

    Attributes:
        name: for errors, such as `A` or a commit.
        python: the interpreter.
        job: what it compiles.
    """

    name: str
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
        """Return the seconds that so many optimizer steps take."""
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._stdin.write(f"run {steps}\n".encode())
        return float(self._answer(_LONGEST_BURST))

    def _answer(self, seconds: float) -> str:
        ends = time.monotonic() + seconds
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._stdout], [], [], max(0.0, ends - time.monotonic()))
            if not readable:
                raise UserError(f"{self._program.name}: no answer of its process within {seconds:.0f} s")
            part = self._stdout.read(4096)
            if not part:
                raise UserError(f"{self._program.name}: {self._last_words()}")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _last_words(self) -> str:
        """Return the last line that a process which ended wrote to stderr."""
        status = self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        said = one_line(lines[-1])[:_LONGEST_LINE] if lines else "no message"
        return f"its process ended with exit status {status}: {said}"


@contextlib.contextmanager
def running(programs: Mapping[str, Program]) -> Iterator[dict[str, Worker]]:
    """Start a process for each side, in parallel, and yield them when all have compiled; end them in the end.

    Raises:
        UserError: an interpreter cannot be started, or a program does not build; one line.
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
    """Return the cores that this process may use; empty where the system cannot say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
