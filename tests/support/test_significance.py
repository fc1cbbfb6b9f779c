"""Tests and intervals, against sums by hand, SciPy's own, and how often they hold in simulations."""

import math

import numpy as np
import pytest
from scipy import stats

from gradtrail.support.significance import mcnemar, unpaired_difference


def exact_p(gained: int, lost: int) -> float:
    """The two-sided binomial test, summed term by term."""
    count, smaller = gained + lost, min(gained, lost)
    tail = sum(math.comb(count, k) for k in range(smaller + 1)) / 2**count
    return min(1.0, 2 * tail)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (0, 5), (0, 6), (7, 20), (20, 7), (10, 10), (130, 90)])
def test_mcnemar_is_the_binomial_sum_and_agrees_with_its_interval(gained: int, lost: int):
    result = mcnemar(gained, lost, 1000)
    assert result.p_value == pytest.approx(exact_p(gained, lost) if gained + lost else 1.0, rel=1e-9)
    assert result.difference == pytest.approx((gained - lost) / 1000)
    assert result.low <= result.difference <= result.high
    assert (result.low > 0 or result.high < 0) == (result.p_value < 0.05)
    assert result.is_worse == (lost > gained and result.p_value < 0.05)


@pytest.mark.slow
def test_mcnemar_rarely_calls_an_equal_model_worse():
    rng = np.random.default_rng(0)
    lost = rng.binomial(40, 0.5, 2000)
    assert np.mean([mcnemar(40 - number, number, 500).is_worse for number in lost]) <= 0.035  # 2.5 % on this side


def test_welch_is_scipys_and_says_nothing_without_spread():
    rng = np.random.default_rng(1)
    values, baseline = rng.normal(0.98, 0.002, 5), rng.normal(0.97, 0.004, 7)
    expected = stats.ttest_ind(values, baseline, equal_var=False)
    result = unpaired_difference(values, baseline)
    assert (result.p_value, result.mean) == pytest.approx((expected.pvalue, values.mean() - baseline.mean()))
    assert (result.low, result.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert not unpaired_difference([0.9, 0.9], [0.8, 0.8]).has_interval
    assert unpaired_difference([0.9, 0.9], [0.9, 0.9]).p_value == 1
