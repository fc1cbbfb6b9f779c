"""How much slower one program is than another, as a ratio with an interval that holds on a machine with other work.

Two programs are timed in turn, a burst of one and then a burst of the other, in random order: what slows the machine
down for longer than a burst slows both. Of the log ratios of adjacent bursts the median counts, so that single slow
bursts do not. Two processes of one program differ too, by where their memory lies, and by the same amount for as long
as they live; so both processes are started anew many times, and the interval is that of the mean over these pairs of
processes: it covers what differs from process to process as well as from burst to burst (Kalibera and Jones, "Rigorous
benchmarking in reasonable time", ISMM 2013).

Going on until an interval is narrow makes it too narrow. Here the number of pairs of processes is chosen once, from
the variance of the first ones, and the interval keeps that variance: it then has its level exactly, whatever the number
(Stein, "A two-sample test for a linear hypothesis whose power is independent of the variance", Annals of Mathematical
Statistics 16, 1945). Whether the interval excludes 1 plays no part in when it ends.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import stats

LEVEL = 0.99
WIDEST = 0.03  # of the interval of the ratio
SIDES = ("A", "B")
_FIRST_PAIRS = 10  # of processes, from whose spread the number of all is chosen
_FEWEST_PAIRS = 3  # whatever the budget
_MOST_PAIRS = 200
_BURST_SECONDS = 0.02  # at least
_SLICE, _LONGEST_SLICE = 1 / 18, 7.0  # of the budget, and seconds, that the bursts of one pair of processes may take
_FEWEST_BURSTS = 30  # of each process
_CLOSE = 0.005  # standard error of a pair of processes' log ratio, from which more bursts add little


class Timed(Protocol):
    """A process of one side, ready to work."""

    steps_per_epoch: int

    def run(self, steps: int) -> float:
        """Return the seconds of so many optimizer steps."""


Start = Callable[[], contextlib.AbstractContextManager[Mapping[str, Timed]]]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Seconds of an epoch of B over those of A.

    Attributes:
        ratio: the estimate; above 1 where B is slower.
        low: lower end of the interval.
        high: upper end.
        level: of the interval.
        num_processes: pairs of processes that were timed.
        num_bursts: pairs of bursts, in all of them.
        seconds: that it took in all.
    """

    ratio: float
    low: float
    high: float
    level: float
    num_processes: int
    num_bursts: int
    seconds: float

    @property
    def is_narrow(self) -> bool:
        """Whether the interval is as narrow as was wanted."""
        return self.high - self.low <= WIDEST

    @property
    def verdict(self) -> str:
        """What the interval says: `slower`, `faster`, or that no difference is shown."""
        if self.low > 1:
            return "B is slower"
        return "B is faster" if self.high < 1 else "no difference shown"

    def describe(self) -> str:
        """Return the ratio with its interval, and what it rests on, in a line."""
        line = (
            f"B takes {self.ratio:.3f} × the time of A for an epoch ({self.level:.0%} interval {self.low:.3f} to "
            f"{self.high:.3f}: {self.verdict}; {self.num_bursts} pairs of bursts in {self.num_processes} pairs of "
            f"processes, {self.seconds:.0f} s)"
        )
        return line if self.is_narrow else f"{line}; the budget ended before the interval was narrow"


def compare_times(
    start: Start,
    *,
    budget: float,
    clock: Callable[[], float],
    rng: np.random.Generator,
    note: Callable[[str], object] = lambda _: None,
) -> Ratio:
    """Time two programs in turn until the interval of their ratio is narrow, or the budget ends.

    Args:
        start: starts a process of each side, `A` and `B`, and ends them.
        budget: seconds; a pair of processes that has begun is finished, and three pairs are made in any case.
        clock: returns seconds.
        rng: for the order of each pair of bursts.
        note: takes a line about the progress.
    """
    began, medians, num_bursts = clock(), list[float](), 0
    steps: Mapping[str, int] = {}
    longest = slowest = 0.0
    while len(medians) < needed(medians):
        spent = clock() - began
        if len(medians) >= _FEWEST_PAIRS and spent + slowest > budget:
            break
        with start() as workers:
            steps = steps or burst_steps(workers)
            found = time_in_turn(workers, steps, min(_SLICE * budget, _LONGEST_SLICE), clock=clock, rng=rng)
        medians.append(statistics.median(found))
        num_bursts += len(found)
        longest = clock() - began - spent
        slowest = max(slowest, longest) if len(medians) > 1 else 0.0  # the first one compiled
        note(f"{len(medians)} of {needed(medians)} pairs of processes timed")
    center, half = interval(medians)
    return Ratio(
        ratio=math.exp(center),
        low=math.exp(center - half),
        high=math.exp(center + half),
        level=LEVEL,
        num_processes=len(medians),
        num_bursts=num_bursts,
        seconds=clock() - began,
    )


def burst_steps(workers: Mapping[str, Timed]) -> dict[str, int]:
    """Return the steps of a burst of each side: long enough to be timed, and the same where epochs have as many."""
    found = {}
    for side, worker in workers.items():
        steps, seconds = 1, worker.run(1)
        while seconds < _BURST_SECONDS:
            steps = math.ceil(steps * min(10.0, 1.2 * _BURST_SECONDS / max(seconds, 1e-9)))
            seconds = min(worker.run(steps), worker.run(steps))
        found[side] = steps
    alike = len({worker.steps_per_epoch for worker in workers.values()}) == 1
    return dict.fromkeys(found, max(found.values())) if alike else found


def time_in_turn(
    workers: Mapping[str, Timed],
    steps: Mapping[str, int],
    seconds: float,
    *,
    clock: Callable[[], float],
    rng: np.random.Generator,
) -> list[float]:
    """Return the log ratios of adjacent bursts, B over A; the order within a pair is random.

    Args:
        workers: a process of each side.
        steps: of a burst.
        seconds: after which it ends, though the median of the log ratios is not yet known closely.
        clock: returns seconds.
        rng: for the order.
    """
    per_epoch = {side: worker.steps_per_epoch / steps[side] for side, worker in workers.items()}
    ends, found = clock() + seconds, list[float]()
    while len(found) < _FEWEST_BURSTS or (clock() < ends and not _is_close(found)):
        taken = {side: workers[side].run(steps[side]) * per_epoch[side] for side in rng.permutation(SIDES)}
        found.append(math.log(taken["B"] / taken["A"]))
    return found


def _is_close(found: Sequence[float]) -> bool:
    """Whether the median has a small standard error, by the quartiles: as if normal, but whatever the outliers."""
    if len(found) % _FEWEST_BURSTS:
        return False
    lower, _, upper = statistics.quantiles(found, n=4)
    return 0.93 * (upper - lower) / math.sqrt(len(found)) <= _CLOSE


def needed(medians: Sequence[float]) -> int:
    """Return how many pairs of processes make the interval narrow, as far as that is known (Stein's second stage)."""
    if len(medians) < _FIRST_PAIRS:
        return _FIRST_PAIRS
    center, half = statistics.fmean(medians[:_FIRST_PAIRS]), _half_width(medians[:_FIRST_PAIRS], 1)
    wanted = WIDEST / (2 * math.exp(center)) * 0.98  # in logs; the rest is for a center that still moves
    return min(_MOST_PAIRS, max(_FIRST_PAIRS, math.ceil((half / wanted) ** 2)))


def interval(medians: Sequence[float]) -> tuple[float, float]:
    """Return center and half width of the interval of the mean; the width rests on the variance of the first ones."""
    return statistics.fmean(medians), _half_width(medians[:_FIRST_PAIRS], len(medians))


def _half_width(first: Sequence[float], count: int) -> float:
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(first) - 1))
    return quantile * statistics.stdev(first) / math.sqrt(count)
