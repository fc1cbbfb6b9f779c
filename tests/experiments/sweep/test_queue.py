"""What is missing of a comparison is given to an engine; DVC's queue is waited for as long as a worker may run it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from factories import ROOT

from gradtrail.experiments.sweep import engine as engines
from gradtrail.experiments.sweep import missing
from gradtrail.experiments.sweep import queue as sweep_queue
from gradtrail.experiments.sweep.engine import QueueEngine
from gradtrail.experiments.sweep.missing import complete
from gradtrail.experiments.sweep.queue import ExperimentQueue, Tasks, wait_for
from gradtrail.experiments.sweep.spec import Comparison, PlannedRun, planned_runs
from gradtrail.support.errors import UserError
from gradtrail.tracking.lineage.state import Experiment

UNREADABLE = ValueError("half a file")
LABELS = {"a": "on, seed 0", "b": "off, seed 0"}


def tasks(waiting: str = "", running: str = "", failed: str = "", *, has_worker: bool = True) -> Tasks:
    return Tasks(waiting=tuple(waiting), running=tuple(running), failed=tuple(failed), has_worker=has_worker)


class Queue:
    """A queue whose states follow each other; the last one stays."""

    def __init__(self, *states: Tasks):
        self._states = list(states)
        self.starts: list[int] = []

    def read(self) -> Tasks:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]

    def start(self, jobs: int) -> None:
        self.starts.append(jobs)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_queue, "_POLL_SECONDS", 0)
    monkeypatch.setattr(sweep_queue, "_STARTUP_SECONDS", 0)


def wait(queue: Any, labels: dict[str, str] = LABELS) -> list[str]:
    return wait_for(queue, labels, jobs=2, title="clipping")


def test_queue_waits_for_its_experiments_and_prints_their_ends(capsys: pytest.CaptureFixture[str]) -> None:
    queue = Queue(tasks("ab"), tasks("bx", "a"), tasks("x", "b"), tasks("x", "b"), tasks("x", failed="b"), tasks("x"))
    assert wait(queue) == ["b"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["clipping: on, seed 0: done (1 of 2)", "clipping: off, seed 0: failed (2 of 2)"]
    assert queue.starts == [2]
    assert queue.read() == tasks("x"), "a task that was not waited for"


def test_new_workers_start_if_the_old_ones_ended_early() -> None:
    queue = Queue(tasks("ab", has_worker=False), tasks("b", "a"), tasks(has_worker=False))
    assert wait(queue) == []
    assert queue.starts == [2, 2]


@pytest.mark.parametrize(
    ("left", "num_starts"), [(tasks("b", has_worker=False), 3), (tasks("", "b", has_worker=False), 1)]
)
def test_waiting_ends_if_no_worker_starts(left: Tasks, num_starts: int, capsys: pytest.CaptureFixture[str]) -> None:
    queue = Queue(left)
    assert wait(queue) == ["b"]
    assert len(queue.starts) == num_starts
    assert "clipping: no worker is left for b: `dvc queue status` shows them" in capsys.readouterr().err


class Reader(ExperimentQueue):
    """A queue over one of DVC's that fails this often."""

    def __init__(self, *faults: Exception):
        left = [*faults]

        def read() -> list[object]:
            if left:
                raise left.pop(0)
            return []

        self._queue = SimpleNamespace(iter_queued=read, iter_active=list, iter_failed=list)


def test_incomplete_file_of_the_queue_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_queue, "_PAUSE_SECONDS", 0)
    assert Reader(*[UNREADABLE] * 3)._entries() == ([], [], [])
    with pytest.raises(UserError, match=r"^DVC's queue cannot be read: half a file$"):
        Reader(*[UNREADABLE] * 4)._entries()


SEEDS = Comparison(
    about="?",
    seeds=(0, 1),
    variants={"on": {"train.clip_norm": 1.0}, "off": {"train.clip_norm": None}},
    timed=True,
)
Changes = Mapping[str, Mapping[str, Any]]


class Engine:
    """Makes all but what it is told to fail."""

    def __init__(self, made: set[PlannedRun], fails: Mapping[str, str]):
        self.made, self.fails = made, fails
        self.asked: list[tuple[Changes, Changes, str]] = []

    def prepare(self, title: str) -> int:
        return 0

    def run(self, title: str, planned: Changes, missing: Changes, stage: str) -> dict[str, str]:
        self.asked.append((planned, missing, stage))
        self.made |= {run for run in planned_runs(SEEDS, SEEDS.seeds) if str(run) not in self.fails}
        return dict(self.fails)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> set[PlannedRun]:
    """The runs that the store has."""
    stored: set[PlannedRun] = set()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(missing, "_find", lambda planned, _: [_Completed(run) for run in planned if run in stored])
    return stored


class _Completed:
    def __init__(self, planned: PlannedRun):
        self.planned = planned


def test_engine_runs_only_missing_experiments(made: set[PlannedRun]) -> None:
    made.add(PlannedRun("on", 0))
    engine = Engine(made, {})
    planned = planned_runs(SEEDS, SEEDS.seeds)
    assert len(complete("clip", SEEDS, planned, engine, "x")) == 4
    ((everything, missing_ones, stage),) = engine.asked
    assert stage == "evaluate"
    assert set(everything) == {"on, seed 0", "on, seed 1", "off, seed 0", "off, seed 1"}
    assert set(missing_ones) == set(everything) - {"on, seed 0"}
    assert missing_ones["off, seed 1"] == {"train.clip_norm": None, "train.seed": 1, "train.members": 1}


def test_invalid_params_start_no_experiment(made: set[PlannedRun]) -> None:
    hot = Comparison(about="?", seeds=(0,), variants={"a": {"train.epochs": -1}, "b": {}}, timed=True)
    engine = Engine(made, {})
    with pytest.raises(UserError, match=r"^x\.a: train\.epochs"):
        complete("hot", hot, planned_runs(hot, hot.seeds), engine, "x")
    assert engine.asked == []


def test_queue_gets_the_changes_as_options_and_must_store_an_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[list[str]] = []
    names = ["one", "two", "lost"]
    monkeypatch.setattr(engines, "queue_experiments", lambda commands: queued.extend(commands) or names)
    monkeypatch.setattr(engines, "wait_for", lambda *_, **__: ["two"])
    monkeypatch.setattr(engines, "find_experiments", lambda: [Experiment(name="one", baseline="", commit="")])
    changes = {"a": {"train.clip_norm": 1.0}, "b": {"train.clip_norm": None, "train.seed": 2}, "c": {}}
    engine = QueueEngine(1, _queue=None)  # type: ignore[arg-type] # which is not read
    assert engine.run("clip", {}, changes, "evaluate") == {
        "b": "`dvc queue logs two` shows why",
        "c": "DVC reports success, but stored no experiment; `dvc queue logs lost` shows why",
    }
    assert [" ".join(command) for command in queued] == [
        "exp run --queue -S train.clip_norm=1.0 evaluate",
        "exp run --queue -S train.clip_norm=null -S train.seed=2 evaluate",
        "exp run --queue evaluate",
    ]
