"""`gradtrail serve` as a process, and clients that send requests over the network."""

import contextlib
import http.client
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factories import ROOT

_SECONDS = 120  # longest wait on a busy machine


@dataclass
class Server:
    """A server that is ready."""

    process: subprocess.Popen[str]
    line: str  # printed when it was ready
    errors: Path  # file of its stderr

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
        status, content = self.send(method, path, body, headers)
        return status, json.loads(content or b"null")

    def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)) as connection:
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, sent, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def metric(self, series: str) -> float:
        """Return the value of a series in `/metrics`; NaN if there is none."""
        lines = self.send("GET", "/metrics")[1].decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} ")), float("nan"))

    def wait(self, condition: Callable[[], Any]) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + _SECONDS
        while not condition():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.05)

    def end(self, number: int) -> int:
        """Send a signal; return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(_SECONDS)


def command(*arguments: str) -> list[str]:
    """Return the command line of `gradtrail serve`."""
    return [sys.executable, "-m", "gradtrail", "serve", *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a server: this folder's code, and only a given token."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("GRADTRAIL_TOKEN", "DVC_ROOT")}
    return inherited | {"PYTHONPATH": str(ROOT / "src")} | more


@contextlib.contextmanager
def server(
    model: str | Path, *options: str, project: Path = ROOT, python: tuple[str, ...] = (), **variables: str
) -> Iterator[Server]:
    """Serve a model on a free port; the server is killed at the end.

    Args:
        model: Folder with an export, or URI.
        options: Options of the command.
        project: Folder of the project.
        python: Options of the interpreter.
        variables: Variables of the environment.
    """
    if isinstance(model, Path):
        errors = model.with_name(f"{model.name}-stderr-{time.monotonic_ns()}")
    else:
        errors = project / f"stderr-{time.monotonic_ns()}"
    whole = [sys.executable, *python, *command("--model", str(model), "--port", "0", *options)[1:]]
    with errors.open("w") as stream:
        process = subprocess.Popen(
            whole, cwd=project, env=environment(**variables), stdout=subprocess.PIPE, stderr=stream, text=True
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
