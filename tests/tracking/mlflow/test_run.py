"""Whatever the store does, the work goes on, with one warning; after a bug of ours it does so with a traceback."""

import contextlib
import json
import queue
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from projects import ROOT

from gradtrail.stages.common.pipeline_file import Entry
from gradtrail.tracking import tracker_process
from gradtrail.tracking.lineage import environment
from gradtrail.tracking.mlflow import client, run, stored_run, tags, tracker
from gradtrail.tracking.mlflow.run import tracked


class FakeStoredRun:
    """A run that records which of its methods were called, and with which points.

    Attributes:
        fault: raised by the calls after the first `count`.
    """

    def __init__(self) -> None:
        self.run_id, self.attempt, self.client = "0", 1, self
        self.fault: Exception | None = None
        self.count = 0
        self.calls, self.statuses = list[str](), list[str]()
        self.points = dict[str, dict[int, float]]()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fault and len(self.calls) > self.count:
            raise self.fault

    def log_points(self, points: dict[str, dict[int, float]]) -> None:
        self._call("log_points")
        for name, curve in points.items():
            self.points.setdefault(name, {}).update(curve)

    def log_outs(self, _: object) -> None:
        self._call("log_outs")

    def link_runs(self) -> None:
        self._call("link_runs")

    def log_timings(self, timings: dict[str, Any], waited: float) -> None:
        assert timings["seconds"].keys() == {"imports", "data", "work"}
        assert waited >= 0

    def set_terminated(self, _: str, status: str) -> None:
        self._call("set_terminated")
        self.statuses.append(status)


class TrackerInProcess:
    """A tracker that handles all messages when its stage waits for it, after their way through JSON."""

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.is_alive = True
        self.kept = list[Path]()

    def send(self, **message: Any) -> None:
        self.inbox.put(json.loads(json.dumps(message)))

    def keep(self, path: Path) -> Path:
        copy = path.with_name(f"{path.name}.{len(self.kept)}")
        copy.write_bytes(path.read_bytes())
        self.kept.append(copy)
        return copy

    def hurry(self) -> None:
        self.seconds = 2.0

    def wait(self) -> None:
        tracker.log_run(self.inbox)

    def close(self) -> None:
        self.is_alive = False


@pytest.fixture(autouse=True)
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stage whose state is known, so that none of its files are needed."""
    runtime = SimpleNamespace(tracking=True, system_metrics=False, tracking_seconds=10.0, trace=False)
    entry = Entry(cmd="", params={}, deps={})
    values = {"spec": SimpleNamespace(outs=()), "runtime": runtime, "state": "0" * 64, "made_at": time.time()}
    inputs = {"inputs": SimpleNamespace(entry=entry, require_unchanged=lambda: None)}
    stage = SimpleNamespace(name="train", folder=tmp_path, entry=lambda _: entry, **values, **inputs)
    monkeypatch.setattr(run, "Identity", lambda _, read_entries: stage if read_entries == {"train": entry} else None)
    monkeypatch.setattr(
        tracker, "Identity", lambda _, read_entries: stage if read_entries == {"train": entry} else None
    )
    monkeypatch.setattr(tracker_process, "TrackerProcess", TrackerInProcess)
    monkeypatch.setattr(environment, "_stage_process", {})
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    return stage


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> FakeStoredRun:
    stored = FakeStoredRun()
    monkeypatch.setattr(client, "open_store", lambda: None)
    monkeypatch.setattr(stored_run, "open_run", lambda *_: stored)
    return stored


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("fault", [ConnectionError("the server\nis gone"), KeyError("the server is gone")])
def test_fault_is_reported_once_and_a_bug_is_not_attributed_to_the_store(
    stage: Any, stored: FakeStoredRun, capsys: pytest.CaptureFixture[str], count: int, fault: Exception
) -> None:
    stored.fault, stored.count = fault, count
    with tracked(stage) as tracked_run:
        tracked_run.metrics({"loss": 1.0})
        tracked_run.outs()
    *before, line = capsys.readouterr().err.splitlines()
    assert stored.calls == ["log_points", "log_outs", "link_runs", "set_terminated"][: count + 1]
    if isinstance(fault, KeyError):
        assert before[0].startswith("Traceback")
        assert before[-1] == "KeyError: 'the server is gone'"
        assert line.startswith("warning: logging to MLflow failed because of the bug above; the results are unaffected")
    else:
        assert before == []
        assert line.startswith("warning: MLflow's store failed (ConnectionError: the server is gone); the results")


def test_bug_in_the_stage_side_is_reported_once_and_the_run_is_closed_as_failed(
    stage: Any, stored: FakeStoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with tracked(stage) as tracked_run:
        tracked_run.metrics({"accuracy": 1.0})
        tracked_run.checkpoint(None, {})  # type: ignore[arg-type]
        assert not tracked_run.is_open
        tracked_run.metrics({"loss": 1.0})
        tracked_run.outs()
    assert stored.calls == ["log_points", "set_terminated"]
    assert list(stored.points) == ["train/accuracy"]
    assert stored.statuses == ["FAILED"]
    *traceback, line = capsys.readouterr().err.splitlines()
    assert traceback[0].startswith("Traceback")
    assert line.startswith("warning: logging to MLflow failed because of the bug above; the results are unaffected")


def test_run_that_cannot_be_opened_is_reported_once_and_not_closed(
    stage: Any, stored: FakeStoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.entry = lambda _: 1 / 0
    with tracked(stage) as tracked_run:
        tracked_run.metrics({"loss": 1.0})
    assert stored.calls == []
    assert capsys.readouterr().err.count("warning:") == 1


def test_the_commit_and_the_changes_are_those_that_the_stage_began_with(
    stage: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tracker looks seconds later, here at the end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".gitignore").write_text("/.gradtrail/\n")
    (tmp_path / "pipeline").mkdir()
    shutil.copy(ROOT / "pipeline/versions.yaml", tmp_path / "pipeline")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(("git", *command.split()), check=True)
    read: list[str] = []

    def open_run(*_: object) -> FakeStoredRun:
        diff = environment.stage_value("diff")
        read.extend([tags.origin_tags()["git.dirty"], Path(diff).read_text() if diff else ""])
        return FakeStoredRun()

    monkeypatch.setattr(client, "open_store", lambda: None)
    monkeypatch.setattr(stored_run, "open_run", open_run)
    monkeypatch.setattr(TrackerInProcess, "keep", lambda _, path: shutil.copy(path, tmp_path.parent / "git.diff"))
    for text in ("first", "second"):
        monkeypatch.setattr(environment, "_stage_process", {})  # this process is the stage's, then the tracker's
        with tracked(stage):
            (tmp_path / "code.py").write_text(f"{text}\n")
    assert read[:2] == ["false", ""]
    assert read[2] == "true"
    assert "+first" in read[3]
    assert "second" not in read[3]


@pytest.mark.parametrize(
    ("fault", "status"), [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_the_run_is_closed_with_a_status_that_says_how_the_stage_ended(
    stage: Any, stored: FakeStoredRun, fault: type[BaseException] | None, status: str
) -> None:
    with pytest.raises(fault) if fault else contextlib.nullcontext(), tracked(stage):
        if fault:
            raise fault
    assert stored.statuses == [status]


def test_points_of_curves_are_logged_together_and_none_is_lost(stage: Any, stored: FakeStoredRun) -> None:
    def diverge() -> None:
        with tracked(stage) as tracked_run:
            for step in range(5):
                tracked_run.curves({"train/loss": {step: 1.0 / (1 + step)}})
            raise FloatingPointError("diverged")

    with pytest.raises(FloatingPointError):
        diverge()
    assert stored.points == {"train/loss": {step: 1.0 / (1 + step) for step in range(5)}}
    assert stored.calls == ["log_points", "set_terminated"]
    assert stored.statuses == ["FAILED"]


@pytest.mark.parametrize("attempt", [1, 3])
def test_each_attempt_adds_a_point_to_the_metrics_of_compiling_alone(
    stage: Any, stored: FakeStoredRun, attempt: int
) -> None:
    stored.attempt = attempt
    with tracked(stage) as tracked_run:
        tracked_run.metrics({"compile/total_seconds": 2.0, "accuracy": 0.5})
    assert {tuple(curve) for name, curve in stored.points.items() if "compile" in name} == {(attempt - 1,)}
    assert {tuple(curve) for name, curve in stored.points.items() if "compile" not in name} == {(0,)}


def test_only_a_server_has_a_limit(stage: Any, stored: FakeStoredRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TrackerInProcess] = []
    monkeypatch.setattr(
        tracker_process, "TrackerProcess", lambda seconds: made.append(TrackerInProcess(seconds)) or made[-1]
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with tracked(stage):
        pass
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with tracked(stage):
        pass
    assert [process.seconds for process in made] == [None, 10.0]
    assert not any(process.is_alive for process in made)


def test_system_metrics_are_sampled_of_long_runs_alone(
    stage: Any, stored: FakeStoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.system_metrics import system_metrics_monitor

    message: list[str] = []

    class Monitor:
        """Stands for MLflow's, which samples every GPU, disks and networks too."""

        def __init__(self, run_id: str, **_: object):
            assert run_id == stored.run_id

        def aggregate_metrics(self) -> dict[str, float]:
            return dict.fromkeys([*tracker.SYSTEM_METRICS[:2], "disk_usage_percentage", "gpu_7_power_usage_watts"], 1.0)

        def start(self) -> None:
            message.append("start")
            assert set(self.aggregate_metrics()) == set(tracker.SYSTEM_METRICS[:2])

        def finish(self) -> None:
            message.append("finish")

    monkeypatch.setattr(system_metrics_monitor, "SystemMetricsMonitor", Monitor)
    stage.runtime.system_metrics = True
    for seconds, expected in ((3600.0, []), (0.0, ["start", "finish"])):
        monkeypatch.setattr(tracker, "_MONITOR_AFTER_SECONDS", seconds)
        with tracked(stage) as tracked_run:
            tracked_run.metrics({"loss": 1.0})
        assert message == expected
