"""Intervals agree with SciPy and with tables, end at possible values, and hold as often as they should."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.intervals import mean_share_interval, median_interval, pivotal_intervals, share_interval


@given(st.integers(1, 10_000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_the_interval_of_a_share_is_scipys(trial: tuple[int, int]) -> None:
    result, expected = share_interval(*trial), scipy.stats.binomtest(*trial).proportion_ci(method="wilson")
    np.testing.assert_allclose((result.low, result.high), (expected.low, expected.high), atol=1e-9)


@pytest.mark.parametrize("sizes", [(3, 8, 19, 60), (5, 200), (30, 30)])
def test_95_of_100_intervals_hold_the_mean_of_shares_of_few_trials(sizes: tuple[int, ...]) -> None:
    """A bootstrap of the same trials holds it in 54 to 67 of 100."""
    rng, shares = np.random.default_rng(0), np.linspace(0.97, 0.6, len(sizes))
    hits = rng.binomial(sizes, shares, (2000, len(sizes))).tolist()
    result = [mean_share_interval([*map(share_interval, row, sizes)]) for row in hits]
    assert 0.93 <= np.mean([item.low <= shares.mean() <= item.high for item in result]) <= 0.98
    assert all(0 <= item.low <= item.value <= item.high <= 1 for item in result)
    assert [item.value for item in result] == pytest.approx(np.mean(np.array(hits) / sizes, axis=1).tolist())


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6), (100, 40)])
def test_the_interval_of_a_median_has_the_ranks_of_the_sign_test(count: int, rank: int) -> None:
    """Ranks from a table of the sign test at 5 %, two-sided."""
    result = median_interval(range(count, 0, -1))
    assert (result.value, result.low, result.high) == ((count + 1) / 2, rank, count + 1 - rank)


@pytest.mark.parametrize("count", [1, 5])
def test_a_median_of_few_values_has_infinite_ends(count: int) -> None:
    result = median_interval([2.0] * count)
    assert (result.value, result.low, result.high) == (2.0, -math.inf, math.inf)


@pytest.mark.parametrize("count", [6, 9, 25])
def test_at_least_95_of_100_intervals_hold_the_median(count: int) -> None:
    draws = np.random.default_rng(0).lognormal(size=(2000, count))
    result = [median_interval(item) for item in draws.tolist()]
    assert 0.945 <= np.mean([item.low <= 1.0 <= item.high for item in result]) <= 0.98


def test_pivotal_intervals_hold_the_number_and_end_at_possible_values() -> None:
    resampled = np.array([[0.8, 0.0, 0.6], [0.9, 0.2, 0.7]])
    result = pivotal_intervals(np.array([0.95, 0.05, 0.5]), resampled, np.array([1.0, 1.0, np.inf]))
    assert [(item.low <= item.value <= item.high) for item in result] == [True] * 3
    assert result[0].high == 1.0, "not 1.0975"
    assert result[1].low == 0.0, "not -0.095"
    assert result[2].high == 0.5, "not below the number"
