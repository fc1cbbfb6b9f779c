"""What is missing of a comparison is handed to whatever engine there is, and its failures are told."""

from collections.abc import Mapping
from typing import Any

import pytest
from factories import ROOT

from gradtrail.experiments.sweep import engine as engines
from gradtrail.experiments.sweep import missing
from gradtrail.experiments.sweep.engine import QueueEngine
from gradtrail.experiments.sweep.missing import complete
from gradtrail.experiments.sweep.spec import Comparison, PlannedRun, planned_runs
from gradtrail.support.errors import UserError
from gradtrail.tracking.lineage.snapshots import Experiment

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
