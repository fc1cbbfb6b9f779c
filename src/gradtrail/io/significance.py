"""Whether a difference between two ways of training is more than chance: paired tests over seeds, corrected for many.

Two trainings of one seed begin with the same weights and see the examples in the same order, so they are compared in
pairs: what the seed does to both is taken out. Chance means the seed here, and nothing else: another test split, or
another choice of what is held equal, may say otherwise.

Sources: Student, "The probable error of a mean", Biometrika 6 (1908); S. Holm, "A simple sequentially rejective
multiple test procedure", Scandinavian Journal of Statistics 6 (1979).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.05
_EQUAL = 1e-9  # figures are stored with 9 digits: what lies closer is the same


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of paired differences.

    Attributes:
        mean: of all pairs.
        low: lower end of the 95 % confidence interval; NaN where the pairs do not tell.
        high: upper end.
        p_value: of the hypothesis that there is no difference; NaN with a single pair.
        num_pairs: at least 1.
    """

    mean: float
    low: float
    high: float
    p_value: float
    num_pairs: int


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % confidence interval, which are NaN for a single value.

    `mean ± t · s / √n`, with the sample's standard deviation s and the quantile t of Student's distribution with n − 1
    degrees of freedom.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(1 - LEVEL / 2, len(values) - 1)) * _standard_error(values)
    return mean, mean - half, mean + half


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Compare values in pairs by Student's t-test, two-sided: `t = d̄ / (s_d / √n)`, n − 1 degrees of freedom.

    Where all differences are the same number there is no spread to measure chance by. If it is 0, nothing speaks for a
    difference: p = 1, and the interval is 0. If it is not, the exact sign test counts, which needs no spread: n equal
    signs have p = 2 · 2⁻ⁿ; there is no interval.

    Args:
        values: at least one.
        baseline: of the same length; the values of one place make a pair.
    """
    differences = np.subtract(values, baseline)
    count = len(differences)
    mean, low, high = mean_interval(differences.tolist())
    if count < 2:
        p_value = math.nan
    elif np.ptp(differences) > _EQUAL:
        p_value = 2 * float(stats.t.sf(abs(mean) / _standard_error(differences.tolist()), count - 1))
    elif abs(mean) <= _EQUAL:
        mean, low, high, p_value = 0.0, 0.0, 0.0, 1.0
    else:
        low, high, p_value = math.nan, math.nan, 2.0 ** (1 - count)
    return Difference(mean=mean, low=low, high=high, p_value=p_value, num_pairs=count)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p values of m tests, so that the chance of even one false alarm stays below the level.

    The k-th smallest, from 1, becomes `max over j ≤ k of min(1, (m − j + 1) · p_j)`. Tests that were not made, NaN, do
    not count and stay as they are.
    """
    adjusted = list(p_values)
    made = sorted((p_value, place) for place, p_value in enumerate(p_values) if not math.isnan(p_value))
    highest = 0.0
    for rank, (p_value, place) in enumerate(made):
        highest = max(highest, min(1.0, (len(made) - rank) * p_value))
        adjusted[place] = highest
    return adjusted


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))
