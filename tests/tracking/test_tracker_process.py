"""The tracker of a stage gets every message, never delays the work, and ends with its stage at the latest."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gradtrail.tracking import tracker_process
from gradtrail.tracking.tracker_process import REPORTED, TrackerProcess

READS = "import sys, pathlib; pathlib.Path('got').write_bytes(b''.join(iter(sys.stdin.buffer.readline, b'\"end\"\\n')))"
HANGS = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'ready').touch(); time.sleep(600)"
IMPORTS = "import time; time.sleep(0.5)"
Start = Callable[[str, float | None], TrackerProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Returns a function that starts a program in the place of the tracker."""
    started: list[TrackerProcess] = []

    def start(program: str, seconds: float | None) -> TrackerProcess:
        (tmp_path / "program.py").write_text(program)
        started.append(TrackerProcess(seconds))
        return started[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracker_process, "_MODULE", "program")
    yield start
    for process in started:
        process.close()
        assert process._ended.wait(60)
        assert not psutil.pid_exists(process._process.pid), "no process is left, not even as a zombie"
        assert not process._folder.exists()


def test_messages_come_in_their_order_as_lines_of_json_however_long(start: Start) -> None:
    messages = [
        {"do": "metrics", "values": {str(number): 0.1 * number for number in range(10**size)}} for size in range(6)
    ]
    tracker = start(READS.replace('"end"', '{"do": "end"}'), None)
    for message in messages:
        tracker.send(**message)
    tracker.send(do="end")
    tracker.wait()
    assert [json.loads(line) for line in Path("got").read_bytes().splitlines()] == messages


def test_hanging_tracker_costs_the_limit_and_one_warning(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = start(HANGS, 0.2)
    for _ in range(100):
        tracker.send(do="curves", points={"loss": [[0, 1.0]] * 1000})
    assert tracker.is_alive
    tracker.wait()
    (line,) = capsys.readouterr().err.splitlines()
    assert "no response within 0.2 s, `runtime.tracking_seconds`" in line
    assert "the results are unaffected; `gradtrail sync`" in line


def test_time_of_imports_does_not_count_as_waiting(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(IMPORTS, 0.0).wait()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("program", [HANGS, "import time; time.sleep(600)"])
def test_a_request_to_stop_lowers_the_limit(
    program: str, start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_process, "_HURRIED_SECONDS", 0.1)
    tracker = start(program, 600.0)
    threading.Timer(0.2, tracker.hurry).start()
    tracker.wait()
    assert "no response within " in capsys.readouterr().err


def test_tracker_that_stops_reading_is_a_fault(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_process, "_MAX_MESSAGES", 3)
    tracker = start(HANGS, 0.1)
    sends = (tracker.send(do="files", path="x" * 10**6) for _ in range(5))  # of which one is being written
    with pytest.raises(TimeoutError, match="3 messages wait to be logged"):
        list(sends)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("pass", ""),
        (f"raise SystemExit({REPORTED})", ""),
        ("raise SystemExit(1)", "ended with status 1"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
    ],
)
def test_ended_tracker_is_a_warning_unless_it_reported_why(
    program: str, message: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = start(program, None)
    tracker.wait()
    assert not tracker.is_alive
    tracker.send(do="metrics", values={})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(message)
    assert not message or (message in lines[0] and "the results are unaffected; `gradtrail sync`" in lines[0])


def test_files_are_kept_as_they_were(start: Start, tmp_path: Path) -> None:
    tracker = start(HANGS, 0.1)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "words.txt").write_text("before")
    copies = [tracker.keep(folder), tracker.keep(folder / "words.txt")]
    (folder / "words.txt").write_text("after")
    assert [path.name for path in copies] == ["folder", "words.txt"]
    assert (copies[0] / "words.txt").read_text() == copies[1].read_text() == "before"


STAGE = """
import time
from gradtrail.tracking.tracker_process import TrackerProcess
tracker = TrackerProcess(None)
print(tracker._process.pid, tracker._folder, flush=True)
time.sleep(600)
"""


def test_tracker_ends_with_a_killed_stage() -> None:
    stage = subprocess.Popen([sys.executable, "-c", STAGE], stdout=subprocess.PIPE, text=True)
    pid, folder = (stage.stdout or sys.stdin).readline().split()
    tracker = psutil.Process(int(pid))
    assert os.getsid(tracker.pid) != os.getsid(stage.pid), "Ctrl-C reaches the stage alone"
    stage.send_signal(signal.SIGKILL)
    stage.communicate()
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while tracker.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not Path(folder).exists()
