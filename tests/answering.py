"""`gradtrail serve` as a process of its own, and clients that ask it over the network."""

import contextlib
import http.client
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factories import ROOT

_SECONDS = 120  # that a server may take to start or to end


@dataclass
class Server:
    """A server that is ready.

    Attributes:
        process: that runs it.
        line: that it printed when it was.
        errors: file of its stderr.
    """

    process: subprocess.Popen[str]
    line: str
    errors: Path

    @property
    def address(self) -> str:
        return self.line.split()[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)
        try:
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, sent, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def end(self, number: int) -> int:
        """Send a signal; return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(_SECONDS)


def command(*arguments: str) -> list[str]:
    """Return the command line of `gradtrail serve`."""
    return [sys.executable, "-m", "gradtrail", "serve", *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return that of a server: this folder's code, and no token unless one is given."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("GRADTRAIL_TOKEN", "DVC_ROOT")}
    return inherited | {"PYTHONPATH": str(ROOT / "src")} | more


@contextlib.contextmanager
def server(folder: Path, *options: str, python: tuple[str, ...] = (), **variables: str) -> Iterator[Server]:
    """Serve an export on a free port; the server is killed at the end.

    Args:
        folder: with the export.
        options: of the command.
        python: options of the interpreter.
        variables: of the environment.
    """
    errors = folder.with_name(f"{folder.name}-stderr-{time.monotonic_ns()}")
    whole = [sys.executable, *python, *command(str(folder), "--port", "0", *options)[1:]]
    with errors.open("w") as stream:
        process = subprocess.Popen(
            whole, cwd=ROOT, env=environment(**variables), stdout=subprocess.PIPE, stderr=stream, text=True
        )
    assert process.stdout
    try:
        ready, _, _ = select.select([process.stdout], [], [], _SECONDS)
        line = process.stdout.readline() if ready else ""
        assert line, errors.read_text()
        yield Server(process, line, errors)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
