"""`gradtrail ui`: MLflow's UI for this repository's store; the last line printed is the link to the training runs.

MLflow's own start page is one for GenAI, with its Assistant open. So the UI runs with an app (entry point `mlflow.app`)
that leads to the runs, and gives a browser that has none yet the settings and the view of `ui_view`.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time

import psutil
import requests
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gradtrail.support.errors import UserError
from gradtrail.support.paths import SQLITE, private_folder, store_uri
from gradtrail.support.signals import handling
from gradtrail.tracking.store import open_store
from gradtrail.tracking.sync import describe, sync
from gradtrail.tracking.ui_view import FIRST_SETTINGS, share_view, view_state

_GRACE_SECONDS = 5.0
_START = "GRADTRAIL_UI_START"  # variable: the page of the runs by the shared view, which begins with `#`
# A redirect would replace what follows `#`, which the browser alone knows. MLflow shows a banner above a shared view,
# but none above a view that the browser has stored: a person's own, or else ours as the first.
_SCRIPT = """
const {start, view, settings} = %s;
const stored = ([key, value]) => localStorage.getItem(key) ?? localStorage.setItem(key, value);
Object.entries(settings).forEach(stored);
const key = `MLflowLocalStorage-1.1-ExperimentPage-["${start.split("/")[2]}"]-ReactComponentState`;
if (localStorage.getItem(key) === null) Object.entries({[key]: view, gradtrail: "view"}).forEach(stored);
const own = start.replace(/viewStateShareKey=[^&]*&/, "");
location.replace("/?runs" + (location.hash || (localStorage.getItem("gradtrail") ? own : start)));
"""


def create_app() -> ASGIApp:
    """Return MLflow's server, whose bare address leads to the training runs; a page after `#` stays that page."""
    from mlflow.server.fastapi_app import app  # late: it reads the settings that `mlflow ui` makes

    start = {"start": os.environ[_START], "view": json.dumps(view_state()), "settings": FIRST_SETTINGS}
    script = _SCRIPT % json.dumps(start).replace("<", r"\u003c")
    page = HTMLResponse(f"<!doctype html><title>MLflow</title><script>{script}</script>")

    async def redirected(scope: Scope, receive: Receive, send: Send) -> None:
        is_bare = scope["type"] == "http" and scope["path"] == "/" and not scope["query_string"]
        answer: ASGIApp = page if is_bare else app
        await answer(scope, receive, send)

    return redirected


def serve_ui(port: int) -> None:
    """Sync the store, start the UI unless a tracking server runs it already, and print the link once it answers.

    Returns after Ctrl-C, SIGTERM or a closed terminal.
    """
    is_server = not store_uri().startswith(SQLITE)
    if not is_server:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            ways = f"`make ui PORT={port + 1}` or `gradtrail ui --port {port + 1}`"
            raise UserError(f"port {port}: {error.strerror}; take another: {ways}") from None
    try:
        print(describe(sync()))
    except UserError as error:  # the UI can still show the runs in the store
        print(f"gradtrail: {error}", file=sys.stderr)
    runs = share_view(open_store())
    if is_server:
        print(f"training runs: {store_uri()}/{runs}")
    else:
        _run_until_stopped(port, start=runs)


def _run_until_stopped(port: int, start: str) -> None:
    """Run the UI in a session of its own, which a terminal does not signal, and end it with all its processes."""
    address = f"http://127.0.0.1:{port}"
    stopped: list[int] = []  # a signal may arrive twice: from a terminal and from make
    path = private_folder() / "ui.log"
    command = [sys.executable, "-m", "mlflow", "ui", "--workers", "1", "--port", str(port)]
    command += ["--backend-store-uri", store_uri(), "--app-name", "gradtrail"]
    env = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    env[_START] = start
    with handling(lambda number, _: stopped.append(number), signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with path.open("wb") as log:
            server = psutil.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        is_ready = False
        while not stopped and server.poll() is None:
            with contextlib.suppress(requests.RequestException):
                if not is_ready and requests.get(f"{address}/health", timeout=1).ok:
                    is_ready = True
                    print(f"training runs: {address}", flush=True)
            time.sleep(0.2)
        if not stopped:
            raise UserError(f"MLflow's UI ended with exit status {server.returncode}; {path} says why")
        processes = [*server.children(recursive=True), server]
        for process in processes:
            process.terminate()
        for process in psutil.wait_procs(processes, _GRACE_SECONDS)[1]:
            process.kill()
