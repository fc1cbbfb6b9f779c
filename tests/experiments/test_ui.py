"""`gradtrail ui` prints one link, last, and ends with every process that it started."""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import requests
import uvicorn
from browser import browser, needs_chromium
from projects import ROOT, Project
from servers import free_port
from small_project import finished_small_project
from starlette.responses import HTMLResponse
from starlette.types import Receive, Scope, Send

from gradtrail import cli
from gradtrail.experiments.ui import create_app
from gradtrail.tracking.ui_view import FIRST_SETTINGS, view_state

_LONGEST = 120  # seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "to_all", "number"),
    [
        ("make", True, signal.SIGINT),  # Ctrl-C
        # gradtrail gets it twice, as make passes it on
        pytest.param("make", True, signal.SIGTERM, marks=pytest.mark.nightly),
        ("nohup", False, signal.SIGTERM),
        pytest.param("gradtrail", False, signal.SIGINT, marks=pytest.mark.nightly),
    ],
)
def test_signal_ends_the_server_and_all_its_processes(
    command: str, to_all: bool, number: signal.Signals, tmp_path: Path
) -> None:
    project: Project = finished_small_project().copy(tmp_path / "project")
    (project.folder / "Makefile").write_text("ui:\n\t@$(PYTHON) -m gradtrail ui --port $(PORT)\n")
    assert "$(BIN)/gradtrail ui --port" in (ROOT / "Makefile").read_text()
    port = str(free_port())
    ways = {
        "make": ("make", "ui", f"PYTHON={sys.executable}", f"PORT={port}"),
        "gradtrail": (sys.executable, "-m", "gradtrail", "ui", "--port", port),
    }
    ways["nohup"] = ("nohup", *ways["gradtrail"])
    dead_proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}
    process = project.start(*ways[command], env={"PYTHONPATH": str(project.folder / "src")} | dead_proxy)
    assert process.stdout
    link = next(line for line in process.stdout if "http" in line).split()[-1]
    page = requests.get(link, timeout=_LONGEST)
    assert page.ok, "it is printed once the server answers"
    assert "/runs?viewStateShareKey=" in page.text
    assert "/runs?" not in requests.get(f"{link}/?runs", timeout=_LONGEST).text, "MLflow's page is still served"
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 1 + (command == "make")
    if command == "nohup":
        os.kill(process.pid, signal.SIGHUP)
        time.sleep(0.5)
        assert requests.get(link, timeout=_LONGEST).ok, "a closed terminal does not end it"
    (os.killpg if to_all else os.kill)(process.pid, number)
    rest, _ = process.communicate(timeout=_LONGEST)
    assert "http" not in rest
    _, alive = psutil.wait_procs(started, timeout=_LONGEST)
    assert not alive
    if command != "make":
        assert process.returncode == 0
    assert "Uvicorn running" in (project.folder / ".gradtrail" / "ui.log").read_text()


@needs_chromium
def test_bare_address_leads_to_the_runs_and_keeps_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def mlflow_page(scope: Scope, receive: Receive, send: Send) -> None:
        await HTMLResponse("<p id=mlflow>MLflow</p>")(scope, receive, send)

    monkeypatch.setitem(sys.modules, "mlflow.server.fastapi_app", SimpleNamespace(app=mlflow_page))
    own = "#/experiments/2/runs?compareRunsMode=CHART"
    shared = own.replace("?", "?viewStateShareKey=x&")
    key = 'MLflowLocalStorage-1.1-ExperimentPage-["2"]-ReactComponentState'
    monkeypatch.setenv("GRADTRAIL_UI_START", shared)
    config = uvicorn.Config(create_app(), port=free_port(), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    address = f"http://127.0.0.1:{config.port}/"
    try:
        with browser(tmp_path) as page:
            for stored, fragment, path in (
                ({}, "", own),
                (FIRST_SETTINGS | {key: json.dumps(view_state()), "gradtrail": "view"}, "", own),
                ({key: "{}"}, "", shared),
                ({}, "#/compare-runs?runs=[%22a%22]", "#/compare-runs?runs=[%22a%22]"),
            ):
                page.open(f"{address}?runs")
                page.run(f"localStorage.clear(), Object.assign(localStorage, {json.dumps(stored)})")
                page.open("about:blank")
                page.open(address + fragment)
                page.wait("document.getElementById('mlflow') !== null")
                assert page.run("location.href") == f"{address}?runs{path}"
                storage = page.run("({...localStorage})")
                first = {} if path == shared else {key: json.dumps(view_state()), "gradtrail": "view"}
                assert storage == FIRST_SETTINGS | first | stored
    finally:
        server.should_exit = True
        thread.join()


def test_used_port_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr("sys.argv", ["gradtrail", "ui", "--port", str(port)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"gradtrail: port {port}: Address already in use")
    assert err.endswith(f"; take another: `make ui PORT={port + 1}` or `gradtrail ui --port {port + 1}`\n")
