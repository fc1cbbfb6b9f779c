"""Processes that are measured in turn, so that the drift of a shared machine affects all methods alike.

Each method has a process of its own, since the thread pools of two libraries disturb each other. It stays up, and makes
a round when it is asked to; the others wait meanwhile. This module loads no library, for processes that load one.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any


class Worker:
    """A process of a module that calls `answer`.

    Args:
        module: of this folder.
        task: a dataclass, for the module as JSON.
        python: interpreter that has the module's libraries.

    Attributes:
        ready: what it reported when it was ready; None where it failed.
        note: why it failed: the line of its traceback that names the error. None where it did not.
    """

    def __init__(self, module: str, task: Any, python: str = sys.executable) -> None:
        self.note: str | None = None
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `stop`)
        self._process = subprocess.Popen(
            (python, "-m", f"benchmarks.{module}", json.dumps(dataclasses.asdict(task))),
            env={"JAX_PLATFORMS": "cpu", **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.ready = self._read()

    def ask(self) -> Any:
        """Have a round made and return what the process reports of it; None where it has failed."""
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


def answer(ready: Any, make_round: Callable[[], Any]) -> None:
    """Report that this process is ready, and then the result of a round for each line of the standard input."""
    print(json.dumps(ready), flush=True)
    for _ in sys.stdin:
        print(json.dumps(make_round()), flush=True)
