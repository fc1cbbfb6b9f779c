"""A real tracking server on loopback, and a proxy before it that is as slow or as dead as one likes."""

import contextlib
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from mlflow import MlflowClient
from projects import Project, environment

from gradtrail.tracking.tags import outputs

_SECONDS = 120  # that a server may take to start


@dataclass(frozen=True)
class TrackingServer:
    """A server that runs, and what a person would ask it."""

    port: int

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs, the newest first, as `Project.runs` does."""
        experiments = self._client.search_experiments()
        ids = [one.experiment_id for one in experiments if "gradtrail.experiment" in one.tags]
        runs = self._client.search_runs(ids, order_by=["attributes.start_time DESC"]) if ids else []
        return [
            {"id": run.info.run_id, "name": run.info.run_name, "status": run.info.status}
            | {"tags": run.data.tags, "params": run.data.params, "metrics": run.data.metrics}
            | {"outs": outputs(run.data.tags)}
            for run in runs
        ]

    def runs_of(self, stage: str) -> list[dict[str, Any]]:
        return [run for run in self.runs() if run["tags"].get("stage") == stage]

    def artifact(self, run: dict[str, Any], path: str) -> bytes:
        """Return an artifact's content, which the server hands on."""
        query = {"run_uuid": run["id"], "path": path}
        answer = requests.get(f"{self.uri}/get-artifact", query, timeout=_SECONDS)
        answer.raise_for_status()
        return answer.content

    def remove_runs(self) -> None:
        for run in self.runs():
            self._client.set_tag(run["id"], "replaced_by", "")  # else they were deleted by a person
            self._client.delete_run(run["id"])

    @property
    def _client(self) -> MlflowClient:
        return MlflowClient(self.uri)


def answers(url: str) -> bool:
    with contextlib.suppress(requests.RequestException):
        return requests.get(url, timeout=5).status_code < 500
    return False


@contextlib.contextmanager
def service(
    command: list[str], log: Path, env: Mapping[str, str], ready: Any, cwd: Path | None = None
) -> Iterator[subprocess.Popen]:
    """Run a command until the block ends; `ready` says when it answers."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=dict(env), stdout=out, stderr=out, cwd=cwd, start_new_session=True)
        try:
            deadline = time.monotonic() + _SECONDS
            while not ready():
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.2)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def tracking_server(folder: Path, database: str = "") -> Iterator[TrackingServer]:
    """Run `mlflow server` with its artifacts, its log and by default its database in a folder."""
    server = TrackingServer(free_port())
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(server.port)]
    command += ["--workers", "1", "--backend-store-uri", database or f"sqlite:///{folder / 'server.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    env = environment() | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # eight more processes, for what is not used
    with service(command, folder / "server.log", env, lambda: answers(f"{server.uri}/health"), cwd=folder):
        yield server


class Proxy:
    """Relays connections to a server: late, or as many pieces of requests as it `lives` for."""

    def __init__(self, port: int):
        self.delay, self.requests = 0.0, 0
        self.lives: int | None = None  # None: for all
        self._ended = threading.Event()
        proxy = self

        class Relay(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", port)) as upstream:
                    while True:
                        for source in select.select([self.request, upstream], [], [])[0]:
                            piece = source.recv(2**16)
                            if not piece or (source is self.request and not proxy._passes()):
                                return
                            (upstream if source is self.request else self.request).sendall(piece)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:  # a client that did not wait for its answer
                pass

        self._server = Server(("127.0.0.1", 0), Relay)
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def _passes(self) -> bool:
        self.requests += 1
        is_silent = self.lives is not None and self.requests > self.lives
        return not self._ended.wait(None if is_silent else self.delay)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def revive(self) -> None:
        self.delay, self.lives = 0.0, None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@dataclass(frozen=True)
class Client(Project):
    """A project whose store is a server."""

    uri: str

    def _options(self, env: Mapping[str, str] | None) -> dict[str, Any]:
        return super()._options({"MLFLOW_TRACKING_URI": self.uri, **(env or {})})


def make_clone(client: Client, to: Path, *, own_cache: bool = False) -> Client:
    """Clone a project, by default with its cache."""
    client.git("clone", "-q", str(client.folder), str(to))
    clone = Client(to, client.uri)
    if not own_cache:
        clone.dvc("cache", "dir", "--local", str(client.folder / ".dvc" / "cache"))
    return clone
