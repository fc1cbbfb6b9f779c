"""The interval of a ratio of paired times covers the true one as often as it says, whatever the machine does."""

import numpy as np
import pytest

from gradtrail.core.profile.paired import paired_ratio


def test_the_ratio_is_the_median_over_pairs() -> None:
    ratio = paired_ratio([2.0, 30.0, 2.4, 2.2, 2.1, 2.3], [1.0, 10.0, 1.0, 1.0, 1.0, 1.0])
    assert ratio is not None
    assert ratio.value == pytest.approx(2.25)
    assert (ratio.low, ratio.high) == (2.0, 3.0), "of six pairs the smallest and the largest"


@pytest.mark.parametrize(("pairs", "rank"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6), (100, 40)])
def test_the_interval_has_the_ranks_of_the_sign_test(pairs: int, rank: int) -> None:
    """Ranks from a table of the sign test at 5 %, two-sided."""
    ratio = paired_ratio([float(number) for number in range(1, pairs + 1)], [1.0] * pairs)
    assert ratio is not None
    assert (ratio.low, ratio.high) == (rank, pairs + 1 - rank)


@pytest.mark.parametrize("pairs", [0, 1, 5])
def test_few_pairs_have_no_interval(pairs: int) -> None:
    assert paired_ratio([2.0] * pairs, [1.0] * pairs) is None


def test_a_pair_needs_both() -> None:
    assert paired_ratio([2.0] * 9, [1.0] * 5) is None
    assert paired_ratio([2.0] * 9, []) is None


def test_drift_of_the_machine_cancels_out() -> None:
    drift = np.geomspace(1, 50, 9)
    ratio = paired_ratio((1.4 * drift).tolist(), drift.tolist())
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.4, 1.4, 1.4))


def test_at_least_95_of_100_intervals_hold_the_median() -> None:
    rng = np.random.default_rng(0)
    ratios = [paired_ratio(np.exp(rng.laplace(size=9)).tolist(), [1.0] * 9) for _ in range(2000)]
    covered = np.mean([ratio is not None and ratio.low <= 1.0 <= ratio.high for ratio in ratios])
    assert 0.95 <= covered <= 0.97, "with 9 pairs 96.1 %"
