"""`gradtrail ui`: MLflow's UI on this repository's store, with links to views of the trainings and of compiling."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable

import psutil

from gradtrail.stages.common.pipeline_file import read_pipelines
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.paths import SQLITE, store_uri, working_folder
from gradtrail.tracking.mlflow.client import experiment_id, open_store
from gradtrail.tracking.mlflow.ui_view import View, shared_views, write_views
from gradtrail.tracking.sync import sync

_HOST = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS, _GRACE_SECONDS = 0.2, 5.0


def serve(port: int) -> int:
    """Sync the store, print the links to the views, and run the UI; a tracking server has a UI of its own.

    Returns:
        The exit status: 0 after Ctrl-C or SIGTERM, else that of the UI.

    Raises:
        UserError: the port cannot be used; one line.
    """
    is_server = not store_uri().startswith(SQLITE)
    if not is_server:
        _require_free(port)
    try:
        print(sync.sync().describe())
    except UserError as error:  # the runs in the store can be shown nevertheless
        print(f"gradtrail: {one_line(error)}", file=sys.stderr)
    client = open_store()
    experiment = experiment_id(client, "models")
    views = shared_views(read_pipelines(working_folder()))
    write_views(client, experiment, views)
    if is_server:
        _print_links(views, store_uri(), experiment)
        return 0
    _print_links(views, f"http://{_HOST}:{port}", experiment)
    command = [sys.executable, "-m", "mlflow", "ui", "--workers", "1", "--port", str(port)]
    return _run_until_stopped([*command, "--backend-store-uri", store_uri()])


def _print_links(views: Iterable[View], base: str, experiment: str) -> None:
    for view in views:
        print(f"{view.title}: {view.link(base, experiment)}", flush=True)


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port just left is free
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise UserError(f"--port: {port} cannot be used ({error.strerror}); try another") from None


def _run_until_stopped(command: list[str]) -> int:
    """Run a server; at Ctrl-C, SIGTERM or a closed terminal end it and all processes that it has started.

    It runs in a session of its own, so that the signal of a terminal reaches this process alone. Signals may come
    twice, as from a terminal and from make.
    """
    asked: list[int] = []
    before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in _SIGNALS}
    server = subprocess.Popen(command, env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}, start_new_session=True)
    try:
        while not asked:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return server.wait(_POLL_SECONDS)
        return 0
    finally:
        started = _started_by(server)
        for process in started:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        psutil.wait_procs(started, _GRACE_SECONDS)
        for process in {*started, *_started_by(server)}:
            with contextlib.suppress(psutil.Error):
                process.kill()
        server.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _started_by(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return a server's process and those below it, also such as have lost their parent or have their own session."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == server.pid:
                found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return [*found.values()]
