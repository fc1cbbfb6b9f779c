"""Whatever the store does, the work goes on, with one warning; after a bug of ours it does so with a traceback."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradtrail.tracking.mlflow import client, run, stored_run
from gradtrail.tracking.mlflow.run import tracked


class FakeStoredRun:
    """A run that records which of its methods were called, and with which points.

    Attributes:
        fault: raised by the calls after the first `count`.
        gate: `log_points` waits for it.
    """

    def __init__(self) -> None:
        self.run_id, self.attempt, self.client = "0", 1, self
        self.fault: Exception | None = None
        self.count = 0
        self.calls, self.statuses = list[str](), list[str]()
        self.points = dict[str, dict[int, float]]()
        self.gate = threading.Event()
        self.gate.set()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fault and len(self.calls) > self.count:
            raise self.fault

    def log_points(self, points: dict[str, dict[int, float]]) -> None:
        self.gate.wait()
        self._call("log_points")
        for name, curve in points.items():
            self.points.setdefault(name, {}).update(curve)

    def log_outs(self, _: object) -> None:
        self._call("log_outs")

    def link_runs(self) -> None:
        self._call("link_runs")

    def set_terminated(self, _: str, status: str) -> None:
        self._call("set_terminated")
        self.statuses.append(status)


@pytest.fixture(autouse=True)
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stage whose state is known, so that none of its files are needed."""
    runtime = SimpleNamespace(tracking=True, system_metrics=False, tracking_seconds=10.0)
    stage = SimpleNamespace(name="train", folder=tmp_path, runtime=runtime, state="0" * 64)
    monkeypatch.setattr(run, "Identity", lambda _: stage)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    return stage


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStoredRun]:
    stored = FakeStoredRun()
    monkeypatch.setattr(client, "open_store", lambda: None)
    monkeypatch.setattr(stored_run, "open_run", lambda *_: stored)
    yield stored
    stored.gate.set()


def test_a_store_out_of_reach_costs_one_warning(
    stage: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(client, "open_store", fail)
    with tracked(stage) as tracked_run:
        tracked_run.metrics({"loss": 1.0})
        tracked_run.outs()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: MLflow's store failed (ConnectionError: refused); the results are unaffected")


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("fault", [ConnectionError("the server\nis gone"), KeyError("the server is gone")])
def test_a_fault_costs_one_report_and_a_bug_is_not_called_the_stores(
    stage: Any, stored: FakeStoredRun, capsys: pytest.CaptureFixture[str], count: int, fault: Exception
) -> None:
    stored.fault, stored.count = fault, count
    with tracked(stage) as tracked_run:
        tracked_run.metrics({"loss": 1.0})
        tracked_run.outs()
        tracked_run.checkpoint(None, {}) if count < 4 else None  # type: ignore[arg-type]
    *before, line = capsys.readouterr().err.splitlines()
    assert stored.calls == ["log_points", "log_points", "log_outs", "link_runs", "set_terminated"][: count + 1]
    if isinstance(fault, KeyError):
        assert before[0].startswith("Traceback")
        assert before[-1] == "KeyError: 'the server is gone'"
        assert line.startswith("warning: logging to MLflow failed because of the bug above; the results are unaffected")
    else:
        assert before == []
        assert line.startswith("warning: MLflow's store failed (ConnectionError: the server is gone); the results")


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


def test_the_work_does_not_wait_for_its_live_curves_and_none_is_lost(stage: Any, stored: FakeStoredRun) -> None:
    stored.gate.clear()

    def diverge() -> None:
        with tracked(stage) as tracked_run:
            for step in range(5):
                tracked_run.curves({"train/loss": {step: 1.0 / (1 + step)}})
            assert stored.points == {}, "the store is busy with the first point"
            stored.gate.set()
            raise FloatingPointError("diverged")

    with pytest.raises(FloatingPointError):
        diverge()
    assert stored.points == {"train/loss": {step: 1.0 / (1 + step) for step in range(5)}}
    assert stored.statuses == ["FAILED"]


def test_only_a_server_has_a_limit(
    stage: Any, stored: FakeStoredRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.runtime.tracking_seconds = 0.1
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    stored.gate.clear()
    threading.Timer(0.3, stored.gate.set).start()
    with tracked(stage) as tracked_run:
        tracked_run.metrics({"loss": 1.0})
    assert (len(stored.points), stored.statuses, capsys.readouterr().err) == (1, ["FINISHED"], "")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    stored.gate.clear()
    with tracked(stage) as tracked_run:
        tracked_run.metrics({"loss": 1.0})
        tracked_run.metrics({"accuracy": 1.0})
    (line,) = capsys.readouterr().err.splitlines()
    assert "no answer within 0.1 s in all; `runtime.tracking_seconds`" in line
    assert "`gradtrail sync`" in line
    assert stored.statuses == ["FINISHED"], "a run that is not complete stays open, for sync to close"


def test_a_stage_that_waits_for_a_server_stops_when_asked(
    stage: Any, stored: FakeStoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr("gradtrail.tracking.mlflow.calls._HURRIED_SECONDS", 0.1)
    stage.runtime.tracking_seconds = 600.0
    stored.gate.clear()

    def work() -> None:
        with tracked(stage) as tracked_run:
            tracked_run.curves({"train/loss": {0: 1.0}})
            threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
            tracked_run.metrics({"loss": 1.0})

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.monotonic() - began < 300, "half of what it would wait otherwise"
