"""Whatever the store does, the work goes on, and a person hears of it once."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradtrail.io import rows, store, tracking
from gradtrail.io.tracking import tracked


def stage(folder: Path) -> Any:
    runtime = SimpleNamespace(tracking=True, system_metrics=False)
    return SimpleNamespace(name="train", folder=folder, runtime=runtime, state="0" * 64)


@pytest.fixture(autouse=True)
def one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "Identity", lambda _: stage(tmp_path))
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

    monkeypatch.setattr(store, "open_store", fail)
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
    monkeypatch.setattr(store, "open_store", lambda: None)
    monkeypatch.setattr(rows, "open_row", lambda *_: failing)
    with tracked(stage(tmp_path)) as row:
        row.metrics({"loss": 1.0})
        row.outs()
        row.checkpoint(None)  # type: ignore[arg-type]
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
    monkeypatch.setattr(store, "open_store", lambda: None)
    monkeypatch.setattr(rows, "open_row", lambda *_: stored)
    with pytest.raises(fault) if fault else contextlib.nullcontext(), tracked(stage(tmp_path)):
        if fault:
            raise fault
    assert closed == [status]
