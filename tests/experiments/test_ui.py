"""`gradtrail ui` ends with every process that it started, whoever is asked to stop; a taken port is told first."""

import os
import signal
import socket
import sys
from pathlib import Path
from subprocess import Popen

import psutil
import pytest
from projects import ROOT, Project
from servers import free_port
from small_project import finished_small_project

from gradtrail import cli

UP = "Uvicorn running on"
_LONGEST = 120  # seconds


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with runs, for a test to change."""
    return finished_small_project().copy(tmp_path / "project")


def started_by(process: Popen[str]) -> list[psutil.Process]:
    """Return the processes of a command once its server answers, and MLflow's job runner has started its own."""
    assert process.stdout
    printed = []
    for line in process.stdout:
        printed.append(line)
        if UP in line:
            break
    else:
        pytest.fail("".join(printed))
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "to_all", "number"),
    [
        ("make", True, signal.SIGINT),  # Ctrl-C
        # gradtrail gets it twice, as make passes it on
        pytest.param("make", True, signal.SIGTERM, marks=pytest.mark.nightly),
        ("make", False, signal.SIGTERM),
        ("gradtrail", False, signal.SIGTERM),
        pytest.param("gradtrail", False, signal.SIGINT, marks=pytest.mark.nightly),
    ],
)
def test_signal_ends_the_server_and_all_its_processes(
    command: str, to_all: bool, number: signal.Signals, project: Project
) -> None:
    makefile = "ui:\n\t@$(PYTHON) -m gradtrail ui --port $(PORT)\n"
    (project.folder / "Makefile").write_text(makefile)
    assert "$(BIN)/gradtrail ui --port" in (ROOT / "Makefile").read_text()
    port = str(free_port())
    ways = {
        "make": ("make", "ui", f"PYTHON={sys.executable}", f"PORT={port}"),
        "gradtrail": (sys.executable, "-m", "gradtrail", "ui", "--port", port),
    }
    process = project.start(*ways[command], env={"PYTHONPATH": str(project.folder / "src")})
    below = started_by(process)
    assert len(below) >= 2 + (command == "make")
    (os.killpg if to_all else os.kill)(process.pid, number)
    process.communicate(timeout=_LONGEST)  # its pipe, which all of them inherited, is closed with the last of them
    _, alive = psutil.wait_procs(below, timeout=_LONGEST)
    assert not alive
    if command == "gradtrail":
        assert process.returncode == 0


def test_used_port_is_reported_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(ROOT))
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
    assert err == f"gradtrail: --port: {port} cannot be used (Address already in use); try another\n"
