"""Probabilities of being wrong, where the truth is known: labels drawn from two known distributions of scores."""

import numpy as np
import pytest

from gradtrail.core.audit.calibration import confident_rate, density_ratio, positions, probability_wrong
from gradtrail.core.common.intervals import share_interval
from gradtrail.core.evaluate.calibration import bins_of_equal_width, fill_bins

RNG = np.random.default_rng(0)
WRONG = RNG.normal(3, 1, 20_000)


def given(number: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores of labels of which a share is wrong, and which are."""
    is_wrong = RNG.random(number) < share
    return np.where(is_wrong, RNG.normal(3, 1, number), RNG.normal(-3, 1, number)), is_wrong


@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
def test_probabilities_are_calibrated_and_sum_to_the_expected_number(share: float) -> None:
    scores, is_wrong = given(20_000, share)
    places = positions(scores, WRONG)
    result = probability_wrong(places, density_ratio(places), share)
    assert result.sum() == pytest.approx(share * 20_000, rel=1e-3)
    assert fill_bins(bins_of_equal_width(result, 15), result, is_wrong, 15).expected_calibration_error < 0.01
    assert np.all(np.diff(result[np.argsort(scores)]) >= 0), "a higher score is never less probably wrong"


def test_a_smaller_split_uses_the_densities_of_a_larger_one_with_its_own_share() -> None:
    ratio = density_ratio(positions(given(20_000, 0.1)[0], WRONG))
    scores, is_wrong = given(1000, 0.01)
    result = probability_wrong(positions(scores, WRONG), ratio, 0.01)
    assert result.sum() == pytest.approx(10, rel=0.01)
    assert result[is_wrong].mean() > 0.5 > result[~is_wrong].mean()


def test_no_label_is_certainly_wrong_and_without_wrong_ones_none_is() -> None:
    places = positions(given(1000, 0.1)[0], WRONG)
    ratio = density_ratio(places)
    assert probability_wrong(places, ratio, 0.1).max() < 1
    assert probability_wrong(places, ratio, 0.0).max() < 1e-9


def test_the_position_of_a_score_is_the_share_of_lower_ones() -> None:
    assert positions(np.array([0.0, 1.0, 1.5, 3.0]), np.array([1.0, 1.0, 2.0])) == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_the_confident_joint_counts_labels_that_another_class_is_confident_of() -> None:
    probabilities = np.array([[0.9, 0.1]] * 8 + [[0.1, 0.9]] * 8 + [[0.05, 0.95]] + [[0.5, 0.5]])
    labels = np.array([0] * 8 + [1] * 8 + [0, 1], np.int32)
    rate = confident_rate(probabilities, labels)
    expected = share_interval(1, 17)
    assert (rate.low, rate.high) == (expected.low, expected.high), "no class is probable enough for the last one"
    assert rate.value == pytest.approx((rate.low + rate.high) / 2)


def test_random_flips_are_counted() -> None:
    truth = RNG.integers(0, 5, 5000)
    probabilities = 0.9 * np.eye(5)[truth] + 0.1 * RNG.dirichlet(np.ones(5), 5000)
    labels = np.where(RNG.random(5000) < 0.1, (truth + 1) % 5, truth).astype(np.int32)
    rate = confident_rate(probabilities, labels)
    assert rate.low < np.mean(labels != truth) < rate.high
