"""The significance level of all tests, 95 % intervals of shares, medians and scores, and bisection.

Out of scope: intervals of means and tests of differences, which need SciPy and take the level from here.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SIGNIFICANCE = 0.05
TAILS = (SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2)  # quantiles at which an interval ends
_Z = statistics.NormalDist().inv_cdf(TAILS[1])


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


def bisect(is_below: Callable[[float], bool], low: float, high: float, *, halvings: int) -> float:
    """Return the number of an interval that `is_below` tells smaller numbers from larger ones by."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


def share_interval(hits: int, total: int) -> Interval:
    """Return the share of hits in one or more trials with its score interval (E. B. Wilson, JASA 22, 1927)."""
    share = hits / total
    centre = share + _Z**2 / (2 * total)
    spread = _Z * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
    low, high = ((centre + sign * spread) / (1 + _Z**2 / total) for sign in (-1, 1))
    return Interval(value=share, low=max(low, 0.0), high=min(high, 1.0))


def mean_share_interval(shares: Sequence[Interval]) -> Interval:
    """Return the mean of independent shares with its interval, from theirs.

    With Wilson's intervals it is wide if one of the shares is of few trials, where a bootstrap of two hits in two
    trials has no spread. The lower end is the mean less √Σ (share - low)² / shares.

    Source: G. Zou and A. Donner, Statistics in Medicine 27 (2008), equation 6.
    """
    mean = sum(share.value for share in shares) / len(shares)
    below = math.hypot(*(share.value - share.low for share in shares)) / len(shares)
    above = math.hypot(*(share.high - share.value for share in shares)) / len(shares)
    return Interval(value=mean, low=mean - below, high=mean + above)


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
