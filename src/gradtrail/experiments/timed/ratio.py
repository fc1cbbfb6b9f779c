"""The ratio of the times of two programs, with an interval that is valid on a machine with other load.

Bursts of the two programs alternate in random order, so a slowdown of the machine that is longer than a burst affects
both; of the log ratios of adjacent bursts the median counts, so single slow bursts do not matter. Two processes of one
program also differ, by their memory layout, for their whole life: both are restarted many times, and the interval is
that of the mean over these pairs of processes (Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM
2013). The variance of the first pairs chooses their number, once, and gives the interval, whose level is then exact for
any number (Stein, Annals of Mathematical Statistics 16, 1945); whether it excludes 1 does not decide when to stop.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.99
WIDEST = 0.03  # target width of the interval of the ratio
SIDES = ("A", "B")
_FIRST_PAIRS = 10  # pairs of processes whose variance determines the number of all pairs
_FEWEST_PAIRS = 3  # for any budget
_MOST_PAIRS = 200
_BURST_SECONDS = 0.02  # shortest burst
_SLICE, _LONGEST_SLICE = 1 / 18, 7.0  # time for one pair of processes: share of the budget, and most seconds
_FEWEST_BURSTS = 30  # bursts per process


@dataclass(frozen=True)
class TimedProcess:
    """A process of one side, ready to run steps."""

    run: Callable[[int], float]  # number of optimizer steps → seconds
    steps_per_epoch: int


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Seconds of an epoch of B divided by those of A."""

    ratio: float  # estimate; above 1 if B is slower
    low: float  # lower end of the interval of level `LEVEL`
    high: float  # upper end of the interval
    num_processes: int  # number of pairs of processes
    num_bursts: int  # number of pairs of bursts over all processes
    seconds: float  # total time of the comparison

    def describe(self) -> str:
        """Return the ratio, its interval and the sample sizes in a line."""
        verdict = "B is slower" if self.low > 1 else "B is faster" if self.high < 1 else "no difference shown"
        line = (
            f"B takes {self.ratio:.3f} × the time of A for an epoch ({LEVEL:.0%} interval {self.low:.3f} to "
            f"{self.high:.3f}: {verdict}; {self.num_bursts} pairs of bursts in {self.num_processes} pairs of "
            f"processes, {self.seconds:.0f} s)"
        )
        is_narrow = self.high - self.low <= WIDEST
        return line if is_narrow else f"{line}; the budget ended before the interval was narrow"


def compare_times(
    start: Callable[[], AbstractContextManager[Mapping[str, TimedProcess]]],
    *,
    budget: float,
    clock: Callable[[], float],
    rng: np.random.Generator,
    note: Callable[[str], object] = lambda _: None,
) -> Ratio:
    """Time two programs in turn until the interval of their ratio is narrow, or the budget of seconds ends.

    `start` starts a process of each side and ends them. At least three pairs of processes are timed.
    """
    began, medians, num_bursts = clock(), list[float](), 0
    steps: Mapping[str, int] = {}
    slowest = 0.0
    while len(medians) < num_pairs(medians):
        spent = clock() - began
        if len(medians) >= _FEWEST_PAIRS and spent + slowest > budget:
            break
        with start() as processes:
            steps = steps or burst_steps(processes)
            log_ratios = _time_in_turn(processes, steps, min(_SLICE * budget, _LONGEST_SLICE), clock, rng)
        medians.append(statistics.median(log_ratios))
        num_bursts += len(log_ratios)
        if len(medians) > 1:  # the first pair compiled
            slowest = max(slowest, clock() - began - spent)
        note(f"{len(medians)} of {num_pairs(medians)} pairs of processes timed")
    center, half = statistics.fmean(medians), _half_width(medians[:_FIRST_PAIRS], len(medians))
    return Ratio(
        ratio=math.exp(center),
        low=math.exp(center - half),
        high=math.exp(center + half),
        num_processes=len(medians),
        num_bursts=num_bursts,
        seconds=clock() - began,
    )


def burst_steps(processes: Mapping[str, TimedProcess]) -> dict[str, int]:
    """Return the steps per burst of each side: long enough to time, and equal if their epochs have equal lengths."""
    result = {}
    for side, process in processes.items():
        steps, seconds = 1, process.run(1)
        while seconds < _BURST_SECONDS:
            steps = math.ceil(steps * min(10.0, 1.2 * _BURST_SECONDS / max(seconds, 1e-9)))
            seconds = min(process.run(steps), process.run(steps))
        result[side] = steps
    are_equal = len({process.steps_per_epoch for process in processes.values()}) == 1
    return dict.fromkeys(result, max(result.values())) if are_equal else result


def num_pairs(medians: Sequence[float]) -> int:
    """Return the number of pairs of processes for the target width, as far as it is known (Stein's second stage)."""
    if len(medians) < _FIRST_PAIRS:
        return _FIRST_PAIRS
    center, half = statistics.fmean(medians[:_FIRST_PAIRS]), _half_width(medians[:_FIRST_PAIRS], 1)
    target = WIDEST / (2 * math.exp(center)) * 0.98  # half width in logs; 0.98 allows for a center that still moves
    return min(_MOST_PAIRS, max(_FIRST_PAIRS, math.ceil((half / target) ** 2)))


def _time_in_turn(
    processes: Mapping[str, TimedProcess],
    steps: Mapping[str, int],
    seconds: float,
    clock: Callable[[], float],
    rng: np.random.Generator,
) -> list[float]:
    """Return the log ratios of adjacent bursts, B over A, that were run in some seconds."""
    bursts_per_epoch = {side: process.steps_per_epoch / steps[side] for side, process in processes.items()}
    ends, log_ratios = clock() + seconds, list[float]()
    while len(log_ratios) < _FEWEST_BURSTS or clock() < ends:
        epochs = {side: processes[side].run(steps[side]) * bursts_per_epoch[side] for side in rng.permutation(SIDES)}
        log_ratios.append(math.log(epochs["B"] / epochs["A"]))
    return log_ratios


def _half_width(first: Sequence[float], count: int) -> float:
    """Return half the width of Student's interval for the mean of `count` values with the variance of the first."""
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(first) - 1))
    return quantile * statistics.stdev(first) / math.sqrt(count)
