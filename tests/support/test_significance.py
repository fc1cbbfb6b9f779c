"""Tests and intervals, against sums by hand and SciPy's own."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gradtrail.core.intervals import SIGNIFICANCE
from gradtrail.support.significance import mcnemar, paired_difference, unpaired_difference


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


def test_welch_says_nothing_without_spread():
    rng = np.random.default_rng(1)
    values, baseline = rng.normal(0.98, 0.002, 5), rng.normal(0.97, 0.004, 7)
    result = unpaired_difference(values, baseline)
    assert result.mean == pytest.approx(values.mean() - baseline.mean())
    assert result.low < result.mean < result.high
    assert not unpaired_difference([0.9, 0.9], [0.8, 0.8]).has_interval
    assert unpaired_difference([0.9, 0.9], [0.9, 0.9]).p_value == 1


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("count", "num_comparisons"), [(2, 1), (3, 1), (10, 1), (5, 2), (5, 6)])
def test_paired_test_equals_scipys_widened_by_bonferroni(count: int, num_comparisons: int) -> None:
    baseline, values = 0.98 + 0.002 * RNG.standard_normal((2, count))
    difference = paired_difference(values.tolist(), baseline.tolist(), num_comparisons=num_comparisons)
    expected = stats.ttest_rel(values, baseline)
    interval = expected.confidence_interval(1 - SIGNIFICANCE / num_comparisons)
    assert difference.p_value == pytest.approx(min(1, num_comparisons * expected.pvalue), rel=1e-9)
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert (difference.mean, difference.num_pairs) == (pytest.approx(np.mean(values - baseline)), count)


@given(
    differences=st.lists(st.integers(-20, 20), min_size=2, max_size=8),
    num_comparisons=st.integers(1, 8),
    scale=st.sampled_from([1e-4, 1e-2, 1.0]),
)
def test_interval_excludes_zero_if_and_only_if_p_is_below_the_level(
    differences: list[int], num_comparisons: int, scale: float
) -> None:
    values = [scale * difference for difference in differences]
    difference = paired_difference(values, [0.0] * len(values), num_comparisons=num_comparisons)
    assert difference.low <= difference.mean <= difference.high
    assert (
        difference.is_significant == (not difference.low <= 0 <= difference.high) == (difference.p_value < SIGNIFICANCE)
    )


def test_single_pair_has_no_interval_and_no_p_value() -> None:
    difference = paired_difference([0.98], [0.97])
    assert difference.mean == pytest.approx(0.01)
    assert all(math.isnan(value) for value in (difference.low, difference.high, difference.p_value))


@pytest.mark.parametrize(("count", "num_comparisons"), [(2, 1), (6, 1), (6, 3)])
def test_differences_without_spread_count_by_their_signs(count: int, num_comparisons: int) -> None:
    values = [round(0.4 + 0.1 * number, 2) for number in range(count)]
    later = [round(value + 0.03, 2) for value in values]
    assert np.ptp(np.subtract(later, values)) > 0, "the last bits differ"
    difference = paired_difference(later, values, num_comparisons=num_comparisons)
    assert difference.p_value == min(1, num_comparisons * stats.binomtest(count, count).pvalue)
    assert difference.is_significant == (difference.p_value < SIGNIFICANCE) == difference.has_interval
