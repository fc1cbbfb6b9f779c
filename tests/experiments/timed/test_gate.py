"""`gradtrail gate --timed`, and the statistics of timed comparisons on machines that are made up."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from projects import Project, copy_project

from gradtrail.experiments.timed import gate
from gradtrail.experiments.timed.ratio import LEVEL, Ratio, TimedProcess, burst_steps, compare_times
from gradtrail.support.errors import UserError


def ratio(low: float, high: float) -> Ratio:
    middle = (low * high) ** 0.5
    return Ratio(ratio=middle, low=low, high=high, level=LEVEL, num_processes=8, num_bursts=240, seconds=60.0)


@pytest.mark.parametrize(
    ("low", "high", "is_slow"), [(0.99, 1.01, False), (1.005, 1.03, False), (1.03, 1.06, True), (0.9, 1.3, False)]
)
def test_only_an_interval_above_the_tolerance_fails(low: float, high: float, is_slow: bool) -> None:
    assert gate.is_too_slow(ratio(low, high)) == is_slow


def test_missing_commit_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"accepted\.json: is in no commit"):
        gate.run_timed_gate(Path("accepted.json"), seconds=1.0)


@pytest.mark.nightly
def test_slower_training_in_the_working_folder_fails(tmp_path: Path) -> None:
    project: Project = copy_project(tmp_path / "project")
    project.set("train.mlp.hidden", [32])
    accepted = project.folder / "benchmarks/accepted_costs.json"
    accepted.parent.mkdir()
    accepted.write_text(json.dumps({"machine": {}, "params": {}, "costs": {}}))
    project.commit("costs accepted")
    project.set("train.mlp.hidden", [2048, 1024])
    code = (
        "import sys; from pathlib import Path; from gradtrail.experiments.timed.gate import run_timed_gate; "
        "sys.exit(run_timed_gate(Path('benchmarks/accepted_costs.json'), seconds=1.0))"
    )
    output = project.python("-c", code, status=1)
    assert "slower by more than 2%, over the whole interval" in output
    assert len(project.git("worktree", "list").strip().splitlines()) == 1


@dataclass
class Machine:
    """A machine with other load, whose clock advances only while a process runs."""

    rng: np.random.Generator
    slowdown: float = 1.0  # true ratio of B to A
    by_process: float = 0.005  # spread of the logarithm of a process' speed
    by_burst: float = 0.05  # spread of the logarithm of a burst's speed
    stolen: float = 0.1  # share of bursts that other work makes up to ten times longer
    start_seconds: float = 3.0
    now: float = 0.0
    alive: int = 0
    load: float = 0.0  # shared by both sides; it drifts slowly
    order: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=lambda: {"A": 430, "B": 430})

    def clock(self) -> float:
        return self.now

    @contextlib.contextmanager
    def start(self) -> Iterator[Mapping[str, TimedProcess]]:
        self.now += self.start_seconds
        self.alive += 2
        yield {side: Process(self, side, self.steps[side]) for side in "AB"}
        self.alive -= 2


class Process:
    def __init__(self, machine: Machine, side: str, steps_per_epoch: int):
        self.machine, self.side, self.steps_per_epoch = machine, side, steps_per_epoch
        self.speed = machine.rng.normal(0, machine.by_process)

    def run(self, steps: int) -> float:
        machine, rng = self.machine, self.machine.rng
        machine.load = 0.95 * machine.load + rng.normal(0, 0.02)
        log = self.speed + machine.load + rng.normal(0, machine.by_burst)
        step_seconds = 0.43 / self.steps_per_epoch * (machine.slowdown if self.side == "B" else 1.0)
        seconds = step_seconds * steps * math.exp(log) * (rng.uniform(1, 10) if rng.random() < machine.stolen else 1.0)
        machine.now += seconds
        machine.order.append(self.side)
        return seconds


def compared(machine: Machine, budget: float = 120.0) -> Ratio:
    return compare_times(machine.start, budget=budget, clock=machine.clock, rng=machine.rng)


def tries(count: int, **about: float) -> list[Ratio]:
    return [compared(Machine(np.random.default_rng(seed), **about)) for seed in range(count)]  # type: ignore[arg-type] # floats


@pytest.mark.slow
def test_interval_covers_the_true_ratio_at_its_level() -> None:
    for by_process in (0.0, 0.012):
        result = tries(80, by_process=by_process)
        held = sum(one.low <= 1 <= one.high for one in result)
        assert held >= 80 * LEVEL - 3, by_process  # less three standard deviations
        assert sum(one.low <= 1.05 <= one.high for one in result) <= 2


def test_interval_is_narrow_and_detects_five_percent() -> None:
    noise = {"by_process": 0.004, "by_burst": 0.03}
    same, slower = tries(20, **noise), tries(20, slowdown=1.05, **noise)
    assert sum(one.is_narrow and one.low <= 1 <= one.high for one in same) >= 19
    assert sum(one.low > 1 for one in slower) >= 18
    assert all(one.seconds <= 120 + 10 for one in same + slower)


def test_differing_processes_are_no_difference_of_programs() -> None:
    """A comparison within one pair of processes would see what belongs to the processes as a difference."""
    result = tries(50, by_process=0.05)
    assert sum(one.low <= 1 <= one.high for one in result) >= 47
    assert not any(one.is_narrow for one in result)
    assert all("the budget ended" in one.describe() for one in result)


def test_budget_ends_the_comparison_after_three_pairs() -> None:
    machine = Machine(np.random.default_rng(0), by_process=0.05, start_seconds=30.0)
    result = compared(machine, budget=20.0)
    assert result.num_processes == 3
    assert machine.alive == 0


def test_ratio_is_that_of_epochs_for_any_batch_size() -> None:
    machine = Machine(np.random.default_rng(0), slowdown=1.5, steps={"A": 430, "B": 215})
    assert compared(machine).ratio == pytest.approx(1.5, rel=0.02)


def test_bursts_are_long_enough_and_equal_for_equal_epochs() -> None:
    quiet = Machine(np.random.default_rng(0), by_burst=0.0, stolen=0.0, by_process=0.0, slowdown=3.0)
    with quiet.start() as workers:
        steps = burst_steps(workers)
        assert steps["A"] == steps["B"]
        assert min(workers[side].run(steps[side]) for side in "AB") > 0.02
