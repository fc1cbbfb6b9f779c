"""`gradtrail ui` prints one link, last, and ends with every process that it started."""

import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
import requests
from projects import ROOT, Project
from servers import free_port
from small_project import finished_small_project

from gradtrail import cli

_LONGEST = 120  # seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "to_all", "number"),
    [
        ("make", True, signal.SIGINT),  # Ctrl-C
        # gradtrail gets it twice, as make passes it on
        pytest.param("make", True, signal.SIGTERM, marks=pytest.mark.nightly),
        ("gradtrail", False, signal.SIGTERM),
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
    process = project.start(*ways[command], env={"PYTHONPATH": str(project.folder / "src")})
    assert process.stdout
    link = next(line for line in process.stdout if "http" in line).split()[-1]
    page = requests.get(link, timeout=_LONGEST)
    assert page.ok, "it is printed once the server answers"
    assert "/runs?viewStateShareKey=" in page.url
    assert "/runs?" not in requests.get(f"{link}/?runs", timeout=_LONGEST).url, "MLflow's page is still served"
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 1 + (command == "make")
    (os.killpg if to_all else os.kill)(process.pid, number)
    rest, _ = process.communicate(timeout=_LONGEST)
    assert "http" not in rest
    _, alive = psutil.wait_procs(started, timeout=_LONGEST)
    assert not alive
    if command == "gradtrail":
        assert process.returncode == 0
    assert "Uvicorn running" in (project.folder / ".gradtrail" / "ui.log").read_text()


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
    assert err.startswith(f"gradtrail: --port {port}: Address already in use")
    assert err.endswith("; choose another one\n")
