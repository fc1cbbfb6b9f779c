"""Timed comparisons: the code that they time, and their statistics on machines that are made up."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from cluster_repository import run_git

from gradtrail.experiments.timed.ratio import LEVEL, WIDEST, Ratio, TimedProcess, burst_steps, compare_times
from gradtrail.experiments.timed.revisions import check_out, scratch, write_params
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError

PARAMS = """train:
  epochs: 3
  clip_norm: 1.0
  average_decay: null
  mlp: {hidden: [32], dropout: 0.0}
environment: {xla_flags: []}
runtime: {trace: false}
"""


def git(*arguments: str) -> str:
    return run_git(Path(), *arguments)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit, whose subfolder `project` is the working folder."""
    folder = tmp_path / "project"
    (folder / "src/gradtrail").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    Path("src/gradtrail/a.py").write_text("A = 1\n")
    Path("params.yaml").write_text(PARAMS)
    run_git(tmp_path, "init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    return folder


@pytest.mark.usefixtures("repository")
def test_unpacked_commit_has_the_uncommitted_changes() -> None:
    commit = git("rev-parse", "HEAD")
    Path("src/gradtrail/a.py").write_text("A = 2\n")
    patch = git("diff") + "\n"
    with scratch() as folder:
        plain, edited = check_out("A", commit, folder / "A"), check_out("B", commit, folder / "B", patch)
        assert (plain / "src/gradtrail/a.py").read_text() == "A = 1\n"
        assert (edited / "src/gradtrail/a.py").read_text() == "A = 2\n"
    assert not folder.exists()


@pytest.mark.usefixtures("repository")
def test_missing_commit_or_changes_are_one_line() -> None:
    head = git("rev-parse", "HEAD")
    for commit, patch, words in (
        ("0" * 40, "", "A: commit 000000000000 cannot be unpacked: "),
        ("", "", "A: commit unknown cannot be unpacked: "),
        (head, "diff --git a/x b/x\nnonsense\n", "cannot be unpacked: `git -C"),
    ):
        with pytest.raises(UserError, match=words) as raised, scratch() as folder:
            check_out("A", commit, folder / "A", patch)
        assert "\n" not in str(raised.value)


def test_params_are_those_of_the_run(repository: Path) -> None:
    recorded = {
        "train.epochs": "5",
        "train.clip_norm": "null",
        "train.average_decay": "0.99",
        "train.mlp.hidden": "[64, 32]",
        "environment.xla_flags": "['--xla_a=1']",
        "train.unknown": "1",
        "runtime.trace": "True",
    }
    write_params(repository, recorded)
    params = read_yaml(repository / "params.yaml")
    network = {"hidden": [64, 32], "dropout": 0.0}
    assert params["train"] == {"epochs": 5, "clip_norm": None, "average_decay": 0.99, "mlp": network}
    assert params["environment"] == {"xla_flags": ["--xla_a=1"]}
    assert params["runtime"] == {"trace": False}


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
    steps: dict[str, int] = field(default_factory=lambda: {"A": 430, "B": 430})

    def clock(self) -> float:
        return self.now

    @contextlib.contextmanager
    def start(self) -> Iterator[dict[str, TimedProcess]]:
        self.now += self.start_seconds
        self.alive += 2
        yield {side: self.process(side) for side in "AB"}
        self.alive -= 2

    def process(self, side: str) -> TimedProcess:
        speed, rng, steps_per_epoch = self.rng.normal(0, self.by_process), self.rng, self.steps[side]

        def run(steps: int) -> float:
            self.load = 0.95 * self.load + rng.normal(0, 0.02)
            factor = math.exp(speed + self.load + rng.normal(0, self.by_burst))
            factor *= rng.uniform(1, 10) if rng.random() < self.stolen else 1.0
            seconds = 0.43 / steps_per_epoch * (self.slowdown if side == "B" else 1.0) * steps * factor
            self.now += seconds
            return float(seconds)

        return TimedProcess(run, steps_per_epoch)


def compared(machine: Machine, budget: float = 120.0) -> Ratio:
    return compare_times(machine.start, budget=budget, clock=machine.clock, rng=machine.rng)


def tries(count: int, **about: float) -> list[Ratio]:
    return [compared(Machine(np.random.default_rng(seed), **about)) for seed in range(count)]  # type: ignore[arg-type] # floats


@pytest.mark.slow
@pytest.mark.parametrize("by_process", [0.0, 0.012, 0.05])
def test_interval_covers_the_true_ratio_at_its_level(by_process: float) -> None:
    """Also where processes differ more than programs: one pair of processes alone would show a difference."""
    held = sum(one.low <= 1 <= one.high for one in tries(80, by_process=by_process))
    assert held >= 80 * LEVEL - 3  # less three standard deviations


def test_interval_is_narrow_and_detects_five_percent() -> None:
    noise = {"by_process": 0.004, "by_burst": 0.03}
    same, slower = tries(20, **noise), tries(20, slowdown=1.05, **noise)
    assert sum(one.high - one.low <= WIDEST and one.low <= 1 <= one.high for one in same) >= 19
    assert sum(one.low > 1 for one in slower) >= 18
    assert all(one.seconds <= 120 + 10 for one in same + slower)


def test_budget_ends_the_comparison_after_three_pairs() -> None:
    machine = Machine(np.random.default_rng(0), by_process=0.05, start_seconds=30.0)
    result = compared(machine, budget=20.0)
    assert (result.num_processes, machine.alive) == (3, 0)
    assert "the budget ended before the interval was narrow" in result.describe()


def test_ratio_is_that_of_epochs_for_any_batch_size() -> None:
    machine = Machine(np.random.default_rng(0), slowdown=1.5, steps={"A": 430, "B": 215})
    assert compared(machine).ratio == pytest.approx(1.5, rel=0.02)


def test_bursts_are_long_enough_and_equal_for_equal_epochs() -> None:
    quiet = Machine(np.random.default_rng(0), by_burst=0.0, stolen=0.0, by_process=0.0, slowdown=3.0)
    with quiet.start() as workers:
        steps = burst_steps(workers)
        assert steps["A"] == steps["B"]
        assert min(workers[side].run(steps[side]) for side in "AB") > 0.02
