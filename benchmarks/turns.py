"""Processes that are measured in turn, so that the drift of a shared machine affects all methods alike.

Each task has a process of its own, since the thread pools of two libraries disturb each other. It stays up, and makes
a round when it is asked to; the others wait meanwhile. This module loads no library, for processes that load one.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

NOT_INSTALLED = "not installed: pip install torch opacus"


@dataclass(kw_only=True)
class Measured:
    """What the process of a task reported."""

    task: Any  # a flat dataclass
    ready: Any = None  # once, when it was ready
    rounds: list[Any] = field(default_factory=list)  # a number each, or several
    note: str | None = None  # why it has no rounds

    @property
    def median(self) -> float:
        """Median of the rounds; NaN if there are none."""
        return statistics.median(self.rounds) if self.rounds and not self.note else math.nan


class Worker:
    """A process of a module of this folder, whose `main` calls `answer`, by an interpreter that has its packages."""

    def __init__(self, module: str, task: Any, python: str = sys.executable) -> None:
        self.note: str | None = None  # the line of its traceback that names the error
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `stop`)
        self._process = subprocess.Popen(
            (python, "-m", f"benchmarks.{module}", repr(dataclasses.asdict(task))),
            env={"JAX_PLATFORMS": "cpu", **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.ready = self._read()

    def ask(self) -> Any:
        """Request a round and return what the process reports; None if it has failed."""
        if self.note:
            return None
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End the process."""
        self._process.communicate()
        self._errors.close()

    def _read(self) -> Any:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._errors.seek(0)
        lines = re.findall(r"^[\w.]+: .+", self._errors.read(), re.MULTILINE)
        self.note = lines[-1] if lines else f"ended with status {self._process.wait()}"
        return None


def measure(module: str, groups: Iterable[Sequence[Any]], rounds: int, peers_python: str = "") -> list[Measured]:
    """Measure the tasks of each group in turn, by processes of a module.

    A task with `packages` runs with the interpreter for peers, if there is one; it is skipped if they are missing here.
    """
    from gradtrail.support.progress import progress_bar

    results = [[Measured(task=task) for task in tasks] for tasks in groups]
    with progress_bar(module, (rounds + 1) * sum(map(len, results)), unit="steps") as bar:
        for group in results:
            with contextlib.ExitStack() as stack:
                workers: list[tuple[Measured, Worker]] = []
                for measured in group:
                    bar.advance(message=str(measured.task))
                    python = (measured.task.packages and peers_python) or sys.executable
                    if python == sys.executable and not all(map(importlib.util.find_spec, measured.task.packages)):
                        measured.note = NOT_INSTALLED
                        continue
                    worker = Worker(module, measured.task, python)
                    stack.callback(worker.stop)
                    measured.ready, measured.note = worker.ready, worker.note
                    workers.append((measured, worker))
                for _ in range(rounds):
                    for measured, worker in workers:
                        if (reported := worker.ask()) is not None:
                            measured.rounds.append(reported)
                        measured.note = worker.note
                        bar.advance()
    return [measured for group in results for measured in group]


def raise_failures(results: Iterable[Measured]) -> None:
    """End the benchmark with status 1 if a process failed, after the results of the others are written."""
    if failures := [f"{one.task}: {one.note}" for one in results if one.note not in (None, NOT_INSTALLED)]:
        raise SystemExit("\n".join(failures))


def read_task(kind: Callable[..., Any]) -> Any:
    """Return the task of this process."""
    return kind(**ast.literal_eval(sys.argv[1]))


def answer(ready: Any, make_round: Callable[[], Any]) -> None:
    """Report that this process is ready, and then the result of a round for each line of the standard input."""
    print(json.dumps(ready), flush=True)
    for _ in sys.stdin:
        print(json.dumps(make_round()), flush=True)
