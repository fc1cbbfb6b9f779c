"""Whatever the store does, the work goes on, and a person hears of it once."""

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


def stage(folder: Path) -> Any:
    runtime = SimpleNamespace(tracking=True, system_metrics=False, tracking_seconds=10.0)
    return SimpleNamespace(name="train", folder=folder, runtime=runtime, state="0" * 64)


@pytest.fixture(autouse=True)
def one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Identity", lambda _: stage(tmp_path))
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))


class FailingRow:
    """A row that takes `count` actions and fails at the next."""

    def __init__(self, count: int):
        self.actions: list[str] = []
        self.count = count
        self.run_id, self.attempt = "0", 1
        self.client = self

    def __getattr__(self, name: str) -> Any:
        def action(*_: Any, **__: Any) -> None:
            self.actions.append(name)
            if len(self.actions) > self.count:
                raise ConnectionError("the server\nis gone")

        return action


def test_a_store_out_of_reach_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(client, "open_store", fail)
    with tracked(stage(tmp_path)) as row:
        row.metrics({"loss": 1.0})
        row.outs()
    (line,) = capsys.readouterr().err.splitlines()
    assert "refused" in line
    assert "gradtrail sync" in line


@pytest.mark.parametrize("count", range(3))
def test_a_store_that_dies_in_the_middle_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    failing = FailingRow(count)
    monkeypatch.setattr(client, "open_store", lambda: None)
    monkeypatch.setattr(stored_run, "open_row", lambda *_: failing)
    with tracked(stage(tmp_path)) as row:
        row.metrics({"loss": 1.0})
        row.outs()
        row.checkpoint(None, {})  # type: ignore[arg-type]
    (line,) = capsys.readouterr().err.splitlines()
    assert "the server is gone" in line
    assert len(failing.actions) == count + 1, "after a fault nothing more is tried"


@pytest.mark.parametrize(
    ("fault", "status"), [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_the_row_is_closed_with_what_became_of_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException] | None, status: str
) -> None:
    closed: list[str] = []
    stored = SimpleNamespace(run_id="0", client=SimpleNamespace(set_terminated=lambda _, how: closed.append(how)))
    monkeypatch.setattr(client, "open_store", lambda: None)
    monkeypatch.setattr(stored_run, "open_row", lambda *_: stored)
    with pytest.raises(fault) if fault else contextlib.nullcontext(), tracked(stage(tmp_path)):
        if fault:
            raise fault
    assert closed == [status]


class BusyRow:
    """A row whose first log of points takes until somebody opens its gate."""

    def __init__(self) -> None:
        self.run_id, self.attempt, self.client = "0", 1, self
        self.gate, self.points, self.closed = threading.Event(), dict[str, dict[int, float]](), list[str]()

    def log_points(self, points: dict[str, dict[int, float]]) -> None:
        self.gate.wait()
        for name, curve in points.items():
            self.points.setdefault(name, {}).update(curve)

    def set_terminated(self, _: str, status: str) -> None:
        self.closed.append(status)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[BusyRow]:
    row = BusyRow()
    monkeypatch.setattr(client, "open_store", lambda: None)
    monkeypatch.setattr(stored_run, "open_row", lambda *_: row)
    yield row
    row.gate.set()


def test_the_work_does_not_wait_for_its_live_curves_and_none_is_lost(tmp_path: Path, busy: BusyRow) -> None:
    def diverge() -> None:
        with tracked(stage(tmp_path)) as row:
            for step in range(5):
                row.curves({"train/loss": {step: 1.0 / (1 + step)}})
            assert busy.points == {}, "the store is at the first"
            busy.gate.set()
            raise FloatingPointError("diverged")

    with pytest.raises(FloatingPointError):
        diverge()
    assert busy.points == {"train/loss": {step: 1.0 / (1 + step) for step in range(5)}}
    assert busy.closed == ["FAILED"]


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", None])
def test_only_a_server_has_a_limit(
    uri: str | None,
    tmp_path: Path,
    busy: BusyRow,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri) if uri else monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    short = stage(tmp_path)
    short.runtime.tracking_seconds = 0.3
    monkeypatch.setattr(run, "Identity", lambda _: short)
    timer = threading.Timer(1, busy.gate.set)
    timer.start()
    with tracked(short) as row:
        row.metrics({"loss": 1.0})
        row.metrics({"accuracy": 1.0})
    said = capsys.readouterr().err
    assert (len(busy.points), busy.closed, said) == (2, ["FINISHED"], "") if uri is None else said.count("\n") == 1
    if uri:
        assert "no answer within 0.3 s in all; `runtime.tracking_seconds`" in said
        assert "`gradtrail sync`" in said
        assert busy.closed == [], "a row that is not complete stays open, for sync to close"


def test_one_that_is_asked_to_stop_while_it_waits_for_a_server_stops(
    tmp_path: Path, busy: BusyRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")

    def work() -> None:
        with tracked(stage(tmp_path)) as row:
            row.curves({"train/loss": {0: 1.0}})
            threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
            row.metrics({"loss": 1.0})

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.monotonic() - began < 5, "of the ten seconds that it would wait else"
