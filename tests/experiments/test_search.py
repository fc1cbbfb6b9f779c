"""`search: optuna`: the best trials go on, a stopped search continues, and a resumed training has the same bytes."""

import dataclasses
import itertools
import math
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import zc.lockfile
from factories import ROOT
from optuna.distributions import BaseDistribution
from projects import copy_project

from gradtrail.experiments.search import Search, Trial, _run_experiment, find, read_space, stops_of
from gradtrail.stages.common.params import PARAMS, validate
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError

RATE, DECAY, HIDDEN = "train.adamw.learning_rate", "train.adamw.weight_decay", "train.mlp.hidden"
ENTRY: dict[str, Any] = {
    "search": "optuna",
    "trials": 20,
    "prune_after": 2,
    "space": {
        RATE: {"low": 1e-4, "high": 1e-1, "log": True},
        DECAY: {"low": 0.001, "high": 1.0},
        HIDDEN: [[16], [64]],
    },
}
EPOCHS = 20


class Trainer:
    """Trains trials by a formula, and stops the whole search before a training once there were `limit`."""

    def __init__(self, limit: float = math.inf):
        self.sizes: list[int] = []  # of the batches
        self.calls: list[tuple[str, int]] = []
        self.epochs: dict[str, int] = {}  # training → epochs that it was trained for
        self.limit = limit

    def __call__(self, batch: Mapping[Trial, int]) -> None:
        self.sizes.append(len(batch))
        for trial, until in batch.items():
            self.train(trial, until)

    def train(self, trial: Trial, until: int) -> None:
        self.calls.append((str(trial), until))
        if self.epochs.get(str(trial), 0) < until:
            if sum(self.epochs.values()) >= self.limit:
                raise KeyboardInterrupt
            self.epochs[str(trial)] = until
        distance = abs(math.log10(trial.changes[RATE]) + 2) + trial.changes[DECAY] + (trial.changes[HIDDEN] == [16])
        has_diverged = trial.changes[RATE] > 0.05
        trial.curve = [] if has_diverged else [1 / (1 + distance + 1 / epoch) for epoch in range(1, until + 1)]


@pytest.fixture
def search() -> Search:
    return validate(ENTRY, Search, "experiments.yaml: tuned")


@pytest.fixture
def space(search: Search) -> dict[str, BaseDistribution]:
    return read_space(search, read_yaml(ROOT / PARAMS), "experiments.yaml: tuned")


def test_best_trials_of_each_stop_go_on(search: Search, space: dict[str, BaseDistribution]) -> None:
    train = Trainer()
    stops = stops_of(search, EPOCHS)
    trials = find(search, space, stops, train)
    assert stops == [2, 6, 18, 20]
    assert len(trials) == len(train.epochs) == search.trials
    for label in train.epochs:
        assert [until for name, until in train.calls if name == label] == stops[: stops.index(train.epochs[label]) + 1]
    for stop, after in itertools.pairwise(stops):
        ranked = sorted((trial for trial in trials if trial.epochs >= stop), key=lambda trial: -trial.accuracy(stop))
        num_kept = len(ranked) // 3
        assert all(trial.epochs >= after for trial in ranked[:num_kept])
        assert not ranked[0].curve or ranked[0].epochs == EPOCHS, "the best one is trained to its end"
    assert trials[0].epochs == EPOCHS
    assert sum(train.epochs.values()) < 0.4 * search.trials * EPOCHS
    assert {trial.epochs for trial in trials if not trial.curve} == {2}, "those that diverged do not go on"
    rates = [abs(math.log10(float(re.findall("rate=([^,]+)", label)[0])) + 2) for label in train.epochs]
    assert sum(rates[10:]) < sum(rates[:10]), "the first ten are drawn at random"


def test_search_without_pruning_trains_every_trial_once(search: Search, space: dict[str, BaseDistribution]) -> None:
    train = Trainer()
    find(search, space, [EPOCHS], train)
    assert [until for _, until in train.calls] == [EPOCHS] * search.trials


@pytest.mark.parametrize("count", [4, 20])
def test_trials_side_by_side_are_as_many_and_differ(
    search: Search, space: dict[str, BaseDistribution], count: int
) -> None:
    search, train = dataclasses.replace(search, trials=count), Trainer()
    trials = find(search, space, stops_of(search, EPOCHS), train, jobs=4)
    assert max(train.sizes) == 4
    assert len({str(trial) for trial in trials}) == len(train.epochs) == search.trials
    assert trials[0].epochs == EPOCHS
    assert len(set(train.calls)) == len(train.calls), "no trial trains twice until an epoch"


@pytest.mark.parametrize("jobs", [1, 3])
def test_interrupted_search_continues_with_the_same_trials(
    search: Search, space: dict[str, BaseDistribution], jobs: int
) -> None:
    stops, train, interrupted = stops_of(search, EPOCHS), Trainer(), Trainer()
    whole = find(search, space, stops, train, jobs)
    for interrupted.limit in range(0, 200, 15):
        try:
            again = find(search, space, stops, interrupted, jobs)
        except KeyboardInterrupt:
            continue
        break
    assert [(trial.changes, trial.epochs) for trial in again] == [(trial.changes, trial.epochs) for trial in whole]
    assert interrupted.epochs == train.epochs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trials": 0}, "tuned.trials must be at least 1"),
        ({"keep_one_in": 1}, "keep_one_in must be at least 2"),
        ({"space": {"train.adamw.rate": [1]}}, "tuned: params.yaml has no key 'train.adamw.rate'"),
        ({"space": {"preprocess.seed": [1, 2]}}, "preprocess.seed: a search changes only how"),
        ({"space": {"train.epochs": [1, 2]}}, "train.epochs: a search changes only how"),
        ({"space": {RATE: {"low": 0.1, "high": 0.01}}}, f"space.{RATE}: must be a list, or have low, high"),
        ({"space": {RATE: {"low": 0.1}}}, f"space.{RATE}: must be a list, or have low, high"),
        ({"space": {RATE: []}}, f"space.{RATE}: must be a list, or have low, high"),
        ({"space": {RATE: 0.1}}, f"space.{RATE}: must be a list, or have low, high"),
    ],
)
def test_mistake_in_an_entry_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_space(validate(ENTRY | change, Search, "tuned"), read_yaml(ROOT / PARAMS), "tuned")
    assert message in str(error.value)


@pytest.mark.slow
def test_trial_waits_for_the_lock_of_dvc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As trials that start together do, longer than the three seconds after which DVC fails."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("runtime: {stop_after_epoch: 1}\n")
    (tmp_path / "dvc.yaml").write_text("stages: {evaluate: {cmd: touch out, params: [runtime], outs: [out]}}\n")
    for command in ("git init --quiet", f"{sys.executable} -m dvc init", "git add .", "git commit --quiet -m first"):
        subprocess.run(command.split(), check=True)
    lock = zc.lockfile.LockFile(".dvc/tmp/lock")
    threading.Timer(5, lock.close).start()
    assert _run_experiment({}, None) == ""


SEARCH_TWICE = """
from gradtrail.experiments.search import run
from gradtrail.experiments.compare.queue import DvcQueue

class Engine(DvcQueue):
    def prepare(self):
        return 0

entry = {
    "search": "optuna",
    "trials": 3,
    "prune_after": 2,
    "keep_one_in": 50,
    "space": {"train.adamw.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}},
}
run("tuned", entry, Engine(1))
print("again", flush=True)
run("tuned", entry, Engine(1))
"""


@pytest.mark.nightly
def test_trial_that_goes_on_has_the_bytes_of_a_training_that_was_never_stopped(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project")
    small = {"fetch.dataset": "digits", "train.epochs": 100, "train.batch_size": 16, "train.mlp.hidden": [16]}
    for key, value in {**small, "runtime.steps_per_call": 1, "runtime.system_metrics": False}.items():
        project.set(key, value)
    project.dvc("repro", "preprocess")
    project.commit("prepared")
    process = project.start(sys.executable, "-c", SEARCH_TWICE, env={"PYTHONPATH": str(project.folder / "src")})
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    first, again = output.split("again\n")
    lines = re.findall(r"^tuned: learning_rate=(\S+): validation \S+% \(epoch (\d+)\)", first, re.MULTILINE)
    assert [epoch for _, epoch in lines] == ["2", "2", "2", "100"], first
    rate = lines[-1][0]
    runs = project.runs_of("train")
    assert sorted(run["status"] for run in runs) == ["FINISHED", "KILLED", "KILLED"]
    (best,) = (run for run in runs if run["status"] == "FINISHED")
    assert best["tags"]["attempts"] == "2"
    assert f"gradtrail checkout {best['id'][:8]}" in first
    assert best["tags"]["dvc.exp_name"] in project.dvc("exp", "list", "--name-only")
    assert re.findall("tuned: the best of .*", again) == re.findall("tuned: the best of .*", first)
    assert len(project.runs_of("train")) == 3
    assert all(run["tags"]["attempts"] in "12" for run in project.runs_of("train")), "nothing was trained again"
    project.set(RATE, float(rate))
    project.set("train.members", 1)
    project.run_stage("train")
    assert best["outs"] == project.digests(*best["outs"])
