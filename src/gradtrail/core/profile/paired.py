"""How much longer one thing takes than another, from times that were taken in turns."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_EACH_SIDE = 0.025  # probability that the interval may miss on either side


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of two times with its 95 % interval."""

    value: float
    low: float
    high: float


def paired_ratio(times: Sequence[float], others: Sequence[float]) -> Ratio | None:
    """Return the median of `times` over `others`, taken pair by pair, so that drift of the machine cancels out.

    The interval assumes nothing about how the ratios are distributed: it lies between the k-th smallest and the k-th
    largest of them, for the largest k with P(B < k) ≤ 2.5 %, where B ~ Binomial(number of pairs, 1/2).

    Returns:
        None for fewer than six pairs, of which no interval has 95 %.
    """
    ratios = sorted(time / other for time, other in zip(times, others, strict=False))
    count, rank, missed = len(ratios), 0, 0.0
    while rank < count and (missed := missed + math.comb(count, rank) / 2**count) <= _EACH_SIDE:
        rank += 1
    if not rank:
        return None
    return Ratio(value=statistics.median(ratios), low=ratios[rank - 1], high=ratios[-rank])
