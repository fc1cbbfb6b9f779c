"""Ranks and correlations against SciPy, orders against sorting."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.gradients import scores

TIED = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=30)


@given(TIED)
def test_ranks_equal_scipy_under_ties(values: list[float]) -> None:
    np.testing.assert_array_equal(scores.ranks(np.array(values)), scipy.stats.rankdata(values))


@given(st.lists(st.tuples(st.integers(0, 5).map(float), st.integers(0, 5).map(float)), min_size=3, max_size=30))
def test_rank_correlation_equals_scipy_and_is_0_where_a_side_is_constant(rows: list[tuple[float, float]]) -> None:
    left, right = np.array(rows).T
    constant = len(set(left)) == 1 or len(set(right)) == 1
    expected = 0.0 if constant else scipy.stats.spearmanr(left, right).statistic
    assert scores.rank_correlation(left, right) == pytest.approx(expected, abs=1e-9)


@given(TIED, st.integers(1, 40))
def test_largest_equals_a_sort_that_keeps_the_order_of_equals(values: list[float], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]
    assert scores.largest(np.array(values), count).tolist() == expected
