"""The ratio of the times of two programs, with an interval that is valid on a machine with other load.

Two programs are timed in turn, a burst of one and then a burst of the other, in random order: a slowdown of the machine
that is longer than a burst affects both. The median of the log ratios of adjacent bursts is used, so that single slow
bursts do not matter. Two processes of one program also differ, by their memory layout, for their whole life; so both
processes are restarted many times, and the interval is that of the mean over these pairs of processes: it covers the
variance between processes as well as between bursts (Kalibera and Jones, "Rigorous benchmarking in reasonable time",
ISMM 2013).

Sampling until an interval is narrow makes it too narrow. Here the number of pairs of processes is chosen once, from the
variance of the first ones, and the interval uses that variance: its level is then exact for any number (Stein, "A
two-sample test for a linear hypothesis whose power is independent of the variance", Annals of Mathematical Statistics
16, 1945). The decision to stop does not depend on whether the interval excludes 1.
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
WIDEST = 0.03  # target width of the interval of the ratio
SIDES = ("A", "B")
_FIRST_PAIRS = 10  # pairs of processes whose variance determines the number of all pairs
_FEWEST_PAIRS = 3  # for any budget
_MOST_PAIRS = 200
_BURST_SECONDS = 0.02  # shortest burst
_SLICE, _LONGEST_SLICE = 1 / 18, 7.0  # longest time for one pair of processes: share of the budget, and seconds
_FEWEST_BURSTS = 30  # bursts per process
_CLOSE = 0.005  # standard error of a pair's log ratio below which more bursts add little


class TimedProcess(Protocol):
    """A process of one side, ready to run steps: a `Worker`, or a simulated one."""

    steps_per_epoch: int

    def run(self, steps: int) -> float:
        """Return the seconds of a number of optimizer steps."""


Start = Callable[[], contextlib.AbstractContextManager[Mapping[str, TimedProcess]]]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Seconds of an epoch of B divided by those of A."""

    ratio: float  # estimate; above 1 if B is slower
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    level: float  # level of the interval
    num_processes: int  # number of pairs of processes
    num_bursts: int  # number of pairs of bursts over all processes
    seconds: float  # total time of the comparison

    @property
    def is_narrow(self) -> bool:
        """Whether the interval has the target width."""
        return self.high - self.low <= WIDEST

    @property
    def verdict(self) -> str:
        """The conclusion from the interval."""
        if self.low > 1:
            return "B is slower"
        return "B is faster" if self.high < 1 else "no difference shown"

    def describe(self) -> str:
        """Return the ratio, its interval and the sample sizes in a line."""
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
        start: A function that starts a process of each side, `A` and `B`, and ends them.
        budget: Seconds; the current pair of processes is finished, and at least three pairs are timed.
        clock: A function that returns seconds.
        rng: Random numbers for the order within pairs of bursts.
        note: A function that is called with a line about the progress.
    """
    began, medians, num_bursts = clock(), list[float](), 0
    steps: Mapping[str, int] = {}
    longest = slowest = 0.0
    while len(medians) < num_pairs(medians):
        spent = clock() - began
        if len(medians) >= _FEWEST_PAIRS and spent + slowest > budget:
            break
        with start() as workers:
            steps = steps or burst_steps(workers)
            log_ratios = time_in_turn(workers, steps, min(_SLICE * budget, _LONGEST_SLICE), clock=clock, rng=rng)
        medians.append(statistics.median(log_ratios))
        num_bursts += len(log_ratios)
        longest = clock() - began - spent
        slowest = max(slowest, longest) if len(medians) > 1 else 0.0  # the first one compiled
        note(f"{len(medians)} of {num_pairs(medians)} pairs of processes timed")
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


def burst_steps(workers: Mapping[str, TimedProcess]) -> dict[str, int]:
    """Return the steps per burst of each side: long enough to time, and equal if their epochs have equal lengths."""
    result = {}
    for side, worker in workers.items():
        steps, seconds = 1, worker.run(1)
        while seconds < _BURST_SECONDS:
            steps = math.ceil(steps * min(10.0, 1.2 * _BURST_SECONDS / max(seconds, 1e-9)))
            seconds = min(worker.run(steps), worker.run(steps))
        result[side] = steps
    are_equal = len({worker.steps_per_epoch for worker in workers.values()}) == 1
    return dict.fromkeys(result, max(result.values())) if are_equal else result


def time_in_turn(
    workers: Mapping[str, TimedProcess],
    steps: Mapping[str, int],
    seconds: float,
    *,
    clock: Callable[[], float],
    rng: np.random.Generator,
) -> list[float]:
    """Return the log ratios of adjacent bursts, B over A; the order within a pair is random.

    Args:
        workers: A process of each side.
        steps: Steps per burst of each side.
        seconds: Longest time, even if the median of the log ratios is not yet precise.
        clock: A function that returns seconds.
        rng: Random numbers for the order.
    """
    per_epoch = {side: worker.steps_per_epoch / steps[side] for side, worker in workers.items()}
    ends, log_ratios = clock() + seconds, list[float]()
    while len(log_ratios) < _FEWEST_BURSTS or (clock() < ends and not _is_precise(log_ratios)):
        epochs = {side: workers[side].run(steps[side]) * per_epoch[side] for side in rng.permutation(SIDES)}
        log_ratios.append(math.log(epochs["B"] / epochs["A"]))
    return log_ratios


def _is_precise(log_ratios: Sequence[float]) -> bool:
    """Whether the median has a small standard error, estimated from the quartiles as if normal, despite outliers."""
    if len(log_ratios) % _FEWEST_BURSTS:
        return False
    lower, _, upper = statistics.quantiles(log_ratios, n=4)
    return 0.93 * (upper - lower) / math.sqrt(len(log_ratios)) <= _CLOSE


def num_pairs(medians: Sequence[float]) -> int:
    """Return the number of pairs of processes for the target width, as far as it is known (Stein's second stage)."""
    if len(medians) < _FIRST_PAIRS:
        return _FIRST_PAIRS
    center, half = statistics.fmean(medians[:_FIRST_PAIRS]), _half_width(medians[:_FIRST_PAIRS], 1)
    target = WIDEST / (2 * math.exp(center)) * 0.98  # half width in logs; 0.98 allows for a center that still moves
    return min(_MOST_PAIRS, max(_FIRST_PAIRS, math.ceil((half / target) ** 2)))


def interval(medians: Sequence[float]) -> tuple[float, float]:
    """Return center and half width of the interval of the mean; the width uses the variance of the first pairs."""
    return statistics.fmean(medians), _half_width(medians[:_FIRST_PAIRS], len(medians))


def _half_width(first: Sequence[float], count: int) -> float:
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(first) - 1))
    return quantile * statistics.stdev(first) / math.sqrt(count)
