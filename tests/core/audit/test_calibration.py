"""Planted labels, and probabilities of being wrong where the truth is known."""

import numpy as np
import pytest

from gradtrail.core.audit.calibration import confident_rate, density_ratio, positions, probability_wrong
from gradtrail.core.audit.noise import draw_confused, draw_uniform, plant
from gradtrail.core.audit.streams import Stream, stream
from gradtrail.core.evaluate import bins_of_equal_width, fill_bins
from gradtrail.core.intervals import share_interval

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


LABELS = np.random.default_rng(0).integers(0, 4, 20_000).astype(np.int32)


def test_uniform_labels_are_each_other_class_equally_often() -> None:
    drawn = draw_uniform(LABELS, 4, seed=1)
    counts = np.bincount(LABELS * 4 + drawn, minlength=16).reshape(4, 4)
    assert drawn.dtype == np.int32
    assert not np.diagonal(counts).any()
    assert np.allclose(counts[~np.eye(4, dtype=bool)] / len(LABELS), 1 / 12, atol=0.01)


def test_confused_labels_follow_the_probabilities_of_the_other_classes() -> None:
    inputs = np.array([0.7, 0.2, 0.1, 0.0])
    drawn = draw_confused(np.tile(inputs, (len(LABELS), 1)), np.zeros_like(LABELS), seed=1)
    assert np.allclose(np.bincount(drawn, minlength=4) / len(LABELS), [0, 2 / 3, 1 / 3, 0], atol=0.01)


def test_a_certain_network_still_confuses_to_another_class() -> None:
    certain = np.eye(4)[LABELS]
    assert not np.any(draw_confused(certain, LABELS, seed=1) == LABELS)


def test_planting_replaces_the_given_share_of_labels() -> None:
    wrong = draw_uniform(LABELS, 4, seed=1)
    planted = plant(LABELS, wrong, 0.1, seed=2)
    changed = planted != LABELS
    assert changed.sum() == 2000
    assert np.array_equal(planted[changed], wrong[changed])
    assert np.array_equal(planted, plant(LABELS, wrong, 0.1, seed=2))
    assert not np.array_equal(planted, plant(LABELS, wrong, 0.1, seed=3))


def test_no_two_streams_coincide() -> None:
    drawn = {
        (identity, which): stream(0, identity, *which).generate_state(4).tobytes()
        for identity in Stream
        for which in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    }
    other_values = {
        np.random.SeedSequence(seed).generate_state(4).tobytes() for seed in (0, (0, 0), (0, 1), (0, 2), (0, 2, 1))
    }
    assert len(set(drawn.values())) == len(drawn)
    assert not other_values & set(drawn.values())
