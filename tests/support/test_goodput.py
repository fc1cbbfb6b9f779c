"""Whatever kills a run, its seconds by cause sum to its time, and are those of a ledger that sees everything."""

import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.support import goodput
from gradtrail.support.goodput import Attempt, Stopwatch, read_attempts, seconds_by_cause

NETWORKS, NUM_STEPS = ("a", "b"), 4  # trained one after the other, each with this number of steps
ACTIONS = ("step", "save", "write", "validation", "data_loading", "tracking")
ENDS = (b"", b'\n{"began": 1.0, "seconds": {"steps": 7', b"\n\0\0\xff")  # what a kill or a crash leaves of a line


@dataclass(frozen=True)
class Plan:
    """What an attempt does until it is killed."""

    imports: int  # seconds
    step: int  # seconds of each step
    actions: list[tuple[str, int]]  # with seconds
    unfinished: int  # seconds of the step that the kill cuts off
    is_lost: bool  # whether all since the last line is lost
    end: bytes  # written last
    idle: int  # seconds after the kill


SECONDS = st.integers(1, 5)
PLANS = st.builds(
    Plan,
    imports=SECONDS,
    step=SECONDS,
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), SECONDS), max_size=20),
    unfinished=st.integers(0, 3),
    is_lost=st.booleans(),
    end=st.sampled_from(ENDS),
    idle=st.integers(0, 9),
)


@dataclass
class Entry:
    """Seconds of the ledger."""

    cause: str
    seconds: int
    network: str
    step: int


class Run:
    """A simulated run, with a clock of its own and a ledger."""

    def __init__(self, path: Path) -> None:
        self.now, self.path, self.ledger, self.num_written = 10**9, path, list[Entry](), 0
        self.saved = dict.fromkeys(NETWORKS, 0)  # network → step of its checkpoint

    def spend(self, cause: str, seconds: int, network: str = "", step: int = 0) -> None:
        self.now += seconds
        self.ledger.append(Entry(cause, seconds, network, step))

    def write(self, watch: Stopwatch) -> None:
        watch.write(self.path)
        self.num_written = len(self.ledger)

    def attempt(self, plan: Plan) -> Stopwatch:
        """Run an attempt until it is killed."""
        self.spend("imports", plan.imports)
        watch = Stopwatch({"imports": plan.imports}, lambda: self.now)
        self.spend("preparation", 1)
        waiting = iter(plan.actions)
        for network in NETWORKS:
            for entry in self.ledger:
                if entry.network == network and entry.step > self.saved[network]:
                    entry.cause = "wasted_progress"
            watch.reached(network, self.saved[network], resumes=True)
            self.write(watch)
            with watch.phase("steps"):
                if not self.is_trained(network, watch, waiting, plan):
                    break
        if not plan.is_lost:
            self.write(watch)
        for entry in self.ledger[self.num_written :]:
            entry.cause, entry.network = "idle", ""
        with self.path.open("ab") as file:
            file.write(plan.end)
        return watch

    def is_trained(self, network: str, watch: Stopwatch, waiting: Iterator[tuple[str, int]], plan: Plan) -> bool:
        """Train a network until its end or the kill."""
        step = self.saved[network]
        while step < NUM_STEPS:
            action, seconds = next(waiting, ("kill", 0))
            if action == "kill":
                self.spend("steps", plan.unfinished, network, step + 1)
                return False
            if action == "step":
                step += 1
                self.spend("steps", plan.step, network, step)
                watch.reached(network, step)
            elif action == "save":
                self.saved[network] = step
            elif action == "write":
                self.write(watch)
            elif action == "data_loading":
                assert list(watch.waiting(self.slow(seconds))) == ["block"]
            else:
                with watch.phase("steps"), watch.phase(action):
                    self.spend(action, seconds)
        self.saved[network] = NUM_STEPS
        return True

    def slow(self, seconds: int) -> Iterator[str]:
        self.spend("data_loading", seconds)
        yield "block"


@given(killed=st.lists(PLANS, max_size=5), last=PLANS)
def test_seconds_by_cause_are_those_of_a_ledger(killed: list[Plan], last: Plan) -> None:
    with TemporaryDirectory() as folder:
        run = Run(Path(folder) / "attempts.jsonl")
        began = run.now
        for plan in killed:
            run.attempt(plan)
            run.spend("idle", plan.idle)
        earlier = read_attempts(run.path)
        attempts = [*earlier, *run.attempt(dataclasses.replace(last, is_lost=False)).attempts]
    assert len(earlier) == len(killed)
    expected = defaultdict[str, int](int)
    for entry in run.ledger:
        expected[entry.cause] += entry.seconds
    seconds = seconds_by_cause(attempts)
    assert sum(seconds.values()) == pytest.approx(run.now - began)
    assert seconds == pytest.approx({cause: value for cause, value in expected.items() if value})


def test_a_damaged_checkpoint_wastes_steps_of_several_attempts() -> None:
    """The third attempt resumes before the step from which the second one did."""
    first = Attempt(began=0.0, seconds={"steps": 10.0}, networks={"a": [(0, 0.0), (10, 10.0)]})
    second = Attempt(began=10.0, seconds={"steps": 2.0}, networks={"a": [(8, 0.0), (10, 2.0)]})
    third = Attempt(began=14.0, seconds={"imports": 1.0, "steps": 6.0}, networks={"a": [(4, 0.0), (10, 6.0)]})
    seconds = seconds_by_cause([first, second, third])
    assert seconds == {"steps": 4.0 + 6.0, "wasted_progress": 6.0 + 2.0, "idle": 2.0, "imports": 1.0}


def test_phase_that_an_exception_ends_is_closed() -> None:
    now = 0.0
    watch = Stopwatch({}, lambda: now)

    @watch.phase("steps")
    @watch.phase("validation")
    def fail() -> None:
        nonlocal now
        now = 3.0
        raise ValueError("fault")

    with pytest.raises(ValueError, match="fault"):
        fail()
    now = 5.0
    assert watch.attempts[-1].seconds == {"preparation": 2.0, "steps": 0.0, "validation": 3.0}


def test_attempt_is_on_disk_while_it_works_and_until_the_run_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "_SECONDS", 0.01)
    monkeypatch.setattr(goodput, "_SHARE", 0.0)
    folder, killed, watch = tmp_path / "new" / "attempts", Stopwatch({"imports": 1.0}), Stopwatch({"imports": 1.0})

    def compile_until_stopped() -> None:
        with killed.recording(folder), killed.phase("compile"):
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                last = (folder / "attempts.jsonl").read_text().splitlines()[-1]
                if json.loads(last)["seconds"].get("compile", 0.0) > 0.05:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # else no line tells of a phase before its end
        compile_until_stopped()
    with watch.recording(folder):
        assert [attempt.began for attempt in watch.attempts] == [killed.attempts[-1].began, watch.attempts[-1].began]
    assert not folder.exists()
    with watch.recording(Path("/proc/nowhere")):
        pass  # a folder that cannot be written costs the record alone
