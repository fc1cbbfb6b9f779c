"""`gradtrail ui`: MLflow's UI for this repository's store, with links to views of trainings and compilations."""

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
from gradtrail.tracking.sync import describe, sync

_HOST = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS, _GRACE_SECONDS = 0.2, 5.0


def serve(port: int) -> int:
    """Sync the store, print the links to the views, and run the UI unless a tracking server runs it already.

    Returns:
        The exit status: 0 after Ctrl-C or SIGTERM, else that of the UI.

    Raises:
        UserError: The port cannot be used.
    """
    is_server = not store_uri().startswith(SQLITE)
    if not is_server:
        _require_free(port)
    try:
        print(describe(sync()))
    except UserError as error:  # the UI can still display the runs in the store
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
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, for a port that was just released
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise UserError(f"--port: {port} cannot be used ({error.strerror}); try another") from None


def _run_until_stopped(command: list[str]) -> int:
    """Run a server; on Ctrl-C, SIGTERM or a closed terminal, end it and all processes that it has started.

    It runs in a new session, so that the terminal signals only this process. Signals may arrive twice: from a terminal
    and from make.
    """
    signals: list[int] = []
    before = {number: signal.signal(number, lambda number, _: signals.append(number)) for number in _SIGNALS}
    server = subprocess.Popen(command, env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}, start_new_session=True)
    try:
        while not signals:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return server.wait(_POLL_SECONDS)
        return 0
    finally:
        processes = _process_tree(server)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        psutil.wait_procs(processes, _GRACE_SECONDS)
        for process in {*processes, *_process_tree(server)}:
            with contextlib.suppress(psutil.Error):
                process.kill()
        server.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _process_tree(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return a server's process and its descendants, including orphans and those with another session."""
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == server.pid:
                tree = (process, *process.children(recursive=True))
                processes |= {member.pid: member for member in tree}
    return [*processes.values()]
