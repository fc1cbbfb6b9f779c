"""More than chance or not: against SciPy's own tests, by hand, and by how often chance alone gives a false alarm."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from gradtrail.experiments.sweep.stats import LEVEL, holm, mean_interval, paired_difference

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_a_paired_test_is_scipys(count: int) -> None:
    baseline, values = 0.98 + 0.002 * RNG.standard_normal((2, count))
    found = paired_difference(values.tolist(), baseline.tolist())
    wanted = stats.ttest_rel(values, baseline)
    interval = wanted.confidence_interval(0.95)
    assert found.p_value == pytest.approx(wanted.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert (found.mean, found.num_pairs) == (pytest.approx(np.mean(values - baseline)), count)


def test_a_paired_test_by_hand() -> None:
    # differences 1, 2, 3: mean 2, sd 1, so t = 2 √3 with 2 degrees of freedom, whose distribution has a closed form
    found = paired_difference([11, 22, 33], [10, 20, 30])
    t = 2 * math.sqrt(3)
    assert found.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert found.high - found.mean == pytest.approx(4.302652729911275 / math.sqrt(3))  # t tables, 97.5 %


def test_an_interval_of_a_mean_is_scipys_and_one_value_has_none() -> None:
    values = RNG.standard_normal(5)
    wanted = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean_interval(values.tolist()) == pytest.approx((values.mean(), wanted.low, wanted.high))
    assert mean_interval([0.5])[0] == 0.5
    assert all(math.isnan(end) for end in mean_interval([0.5])[1:])


def test_one_pair_has_no_interval_and_no_p_value() -> None:
    found = paired_difference([0.98], [0.97])
    assert found.mean == pytest.approx(0.01)
    assert all(math.isnan(value) for value in (found.low, found.high, found.p_value))


def test_equal_results_are_no_difference() -> None:
    found = paired_difference([0.98, 0.97], [0.98, 0.97])
    assert (found.mean, found.low, found.high, found.p_value) == (0, 0, 0, 1)


@pytest.mark.parametrize("count", [2, 6])
def test_differences_without_spread_count_by_their_signs(count: int) -> None:
    values = [round(0.4 + 0.1 * number, 2) for number in range(count)]
    later = [round(value + 0.03, 2) for value in values]
    assert np.ptp(np.subtract(later, values)) > 0, "the last bits differ"
    found = paired_difference(later, values)
    assert found.p_value == stats.binomtest(count, count).pvalue
    assert math.isnan(found.low)


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_a_p_value_that_is_nan_does_not_count() -> None:
    first, second, third = holm([0.02, math.nan, 0.04])
    assert (first, third) == pytest.approx((0.04, 0.04))
    assert math.isnan(second)


def test_holm_rejects_what_the_closure_of_bonferroni_rejects() -> None:
    """A hypothesis falls where every group that it is part of has a p value below the level by the group's size."""
    for p_values in RNG.uniform(0, 0.1, (200, 4)):
        groups = [group for size in range(1, 5) for group in itertools.combinations(range(4), size)]
        for place, adjusted in enumerate(holm(p_values.tolist())):
            falls = all(min(p_values[list(group)]) <= LEVEL / len(group) for group in groups if place in group)
            assert (adjusted <= LEVEL) == falls


def test_chance_alone_gives_false_alarms_at_most_as_often_as_the_level() -> None:
    """Three variants that change nothing, over four seeds: at most one false alarm in twenty comparisons."""
    rng, rounds, alarms = np.random.default_rng(1), 600, 0
    for _ in range(rounds):
        seeds = rng.normal(0.98, 0.002, 4)  # what a seed does to all
        baseline, *variants = seeds + rng.normal(0, 0.001, (4, 4))
        p_values = [paired_difference(variant.tolist(), baseline.tolist()).p_value for variant in variants]
        alarms += min(holm(p_values)) <= LEVEL
    assert 0.02 < alarms / rounds < 0.05 + 3 * math.sqrt(0.05 * 0.95 / rounds)


def test_the_effect_of_the_seed_is_removed() -> None:
    """A difference far below the spread over seeds is found, as it is there in each pair."""
    seeds = RNG.normal(0.9, 0.05, 8)
    values, baseline = seeds + 0.002 + RNG.normal(0, 0.0005, 8), seeds
    assert paired_difference(values.tolist(), baseline.tolist()).p_value < 1e-3
    assert stats.ttest_ind(values, baseline).pvalue > 0.5
