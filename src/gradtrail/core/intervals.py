"""The significance level of all tests, 95 % intervals of shares, means, medians and scores, and bisection.

Out of scope: tests of differences (`support/significance`), which need SciPy and take the level from here.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SIGNIFICANCE = 0.05
TAILS = (SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2)  # quantiles at which an interval ends
_Z = statistics.NormalDist().inv_cdf(TAILS[1])
_HALVINGS = 60  # of an interval of angles: to float64's precision


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


def bisect(holds: Callable[[float], bool], low: float, high: float, *, halvings: int) -> tuple[float, float]:
    """Return bounds of the largest number in an interval for which a condition holds; below that it always holds."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def share_interval(hits: int, total: int) -> Interval:
    """Return the share of hits in one or more trials with its score interval (E. B. Wilson, JASA 22, 1927)."""
    share = hits / total
    centre = share + _Z**2 / (2 * total)
    spread = _Z * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
    low, high = ((centre + sign * spread) / (1 + _Z**2 / total) for sign in (-1, 1))
    return Interval(value=share, low=max(low, 0.0), high=min(high, 1.0))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of two or more normal values with Student's t interval."""
    mean = float(np.mean(values))
    half = _students_t(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Interval(value=mean, low=mean - half, high=mean + half)


def _students_t(dof: int) -> float:
    """Return the t that the absolute value of Student's variable exceeds with the probability `SIGNIFICANCE`.

    Source: M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions" (1964), 26.7.3 and 26.7.4, by bisection.
    """

    def probability(angle: float) -> float:
        """Return P(|T| ≤ √dof tan(angle)), a finite series."""
        is_odd = dof % 2
        total, term = 0.0, math.sin(angle) * math.cos(angle) ** is_odd
        for power in range(is_odd, dof - 1, 2):
            total += term
            term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
        return 2 / math.pi * (angle + total) if is_odd else total

    angle, _ = bisect(lambda angle: probability(angle) < 1 - SIGNIFICANCE, 0.0, math.pi / 2, halvings=_HALVINGS)
    return math.sqrt(dof) * math.tan(angle)


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of independent values with its interval between two of them, whatever their distribution.

    The number of values below the median is binomial; the ends are the order statistics that leave at most 2.5 % on
    either side. With fewer than six values the ends are infinite.

    Source: H. David and H. Nagaraja, "Order Statistics", 3rd edition (2003), section 7.1.
    """
    ordered, count, rank, missed = sorted(values), len(values), 0, 0.0
    while rank < count and (missed := missed + math.comb(count, rank) / 2**count) <= TAILS[0]:
        rank += 1
    low, high = (ordered[rank - 1], ordered[-rank]) if rank else (-math.inf, math.inf)
    return Interval(value=statistics.median(ordered), low=float(low), high=float(high))


def pivotal_intervals(values: np.ndarray, resampled: np.ndarray, highest: np.ndarray) -> list[Interval]:
    """Return numbers with their intervals by the pivotal bootstrap, between 0 and the largest possible value.

    The interval corrects for errors that are larger on a resample than on the sample. It always contains the number.

    Source: A. Davison and D. Hinkley, "Bootstrap Methods and their Application" (1997), section 2.4.

    Args:
        values: numbers measured on the sample.
        resampled: (resamples, numbers), the same numbers measured on resamples.
        highest: largest possible value of each number.
    """
    low, high = np.quantile(resampled, TAILS, axis=0)
    ends = zip(values, np.clip(2 * values - high, 0, values), np.clip(2 * values - low, values, highest), strict=True)
    return [Interval(value=float(value), low=float(low), high=float(high)) for value, low, high in ends]
