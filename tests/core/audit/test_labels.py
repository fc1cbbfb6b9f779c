"""Scores of labels against their definitions, and probabilities of being wrong where the truth is known."""

import jax
import numpy as np
import pytest

from gradtrail.core.audit.labels import (
    CANDIDATES,
    confident_rate,
    density_ratio,
    draw_confused,
    draw_uniform,
    label_scores,
    mean_probabilities,
    plant,
    positions,
    probability_wrong,
)
from gradtrail.core.evaluate import fill_bins
from gradtrail.core.intervals import share_interval
from gradtrail.core.nn import losses

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(scale=3, size=(3, 50, 4)).astype(np.float32)
LABELS = RNG.integers(0, 4, 50).astype(np.int32)


def test_scores_of_one_network_are_those_of_the_losses() -> None:
    scores = label_scores(LOGITS[:1], LABELS, 1.0)
    values = (losses.el2n, losses.margin, losses.label_probability, losses.correct)
    el2n, margin, probability, correct = jax.jit(lambda *arrays: [value(*arrays) for value in values])(
        LOGITS[0], LABELS
    )
    assert np.allclose(scores["el2n"], el2n, atol=1e-5)
    assert np.allclose(scores["log_margin"], -margin, atol=1e-5)
    assert np.allclose(scores["self_confidence"], 1 - probability, atol=1e-5)
    assert np.array_equal(scores["disagreement"], ~correct)


def test_margin_and_odds_of_several_networks_are_those_of_the_mean_probability() -> None:
    mean, scores = mean_probabilities(LOGITS, 2.0), label_scores(LOGITS, LABELS, 2.0)
    for p, y, margin, odds in zip(mean, LABELS, scores["margin"], scores["odds"], strict=True):
        assert margin == pytest.approx(np.delete(p, y).max() - p[y])
        wrong = sum(p[j] * (1 / 3 + p[y] / (1 - p[j])) / 2 for j in range(4) if j != y)
        assert odds == pytest.approx(np.log(wrong / p[y])), "Bayes' rule for the two kinds of noise"


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_less_probable_label_is_more_suspicious(name: str) -> None:
    logits = np.array([[[5.0, 1.0, -2.0]] * 3], np.float32)
    scores = label_scores(logits, np.array([0, 1, 2], np.int32), 1.0)[name]
    assert np.all(np.diff(scores) > 0) or (name == "disagreement" and list(scores) == [0, 1, 1])


WRONG = RNG.normal(3, 1, 20_000)  # scores of wrong labels


def scores_of(number: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of labels of which a share is wrong, and which are."""
    is_wrong = RNG.random(number) < share
    return np.where(is_wrong, RNG.normal(3, 1, number), RNG.normal(-3, 1, number)), is_wrong


@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
def test_probabilities_are_calibrated_and_sum_to_the_expected_number(share: float) -> None:
    scores, is_wrong = scores_of(20_000, share)
    places = positions(scores, WRONG)
    result = probability_wrong(places, density_ratio(places), share)
    assert result.sum() == pytest.approx(share * 20_000, rel=1e-3)
    assert fill_bins(result, is_wrong, 15).expected_calibration_error < 0.01
    assert np.all(np.diff(result[np.argsort(scores)]) >= 0), "a higher score is never less probably wrong"


def test_a_smaller_split_uses_the_densities_of_a_larger_one_with_its_own_share() -> None:
    ratio = density_ratio(positions(scores_of(20_000, 0.1)[0], WRONG))
    scores, is_wrong = scores_of(1000, 0.01)
    result = probability_wrong(positions(scores, WRONG), ratio, 0.01)
    assert result.sum() == pytest.approx(10, rel=0.01)
    assert result[is_wrong].mean() > 0.5 > result[~is_wrong].mean()
    assert result.max() < 1
    assert probability_wrong(positions(scores, WRONG), ratio, 0.0).max() < 1e-9, "without wrong labels none is"


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


MANY = np.random.default_rng(0).integers(0, 4, 20_000).astype(np.int32)


def test_uniform_labels_are_each_other_class_equally_often() -> None:
    drawn = draw_uniform(MANY, 4, seed=1)
    counts = np.bincount(MANY * 4 + drawn, minlength=16).reshape(4, 4)
    assert drawn.dtype == np.int32
    assert not np.diagonal(counts).any()
    assert np.allclose(counts[~np.eye(4, dtype=bool)] / len(MANY), 1 / 12, atol=0.01)


def test_confused_labels_follow_the_probabilities_of_the_other_classes() -> None:
    inputs = np.array([0.7, 0.2, 0.1, 0.0])
    drawn = draw_confused(np.tile(inputs, (len(MANY), 1)), np.zeros_like(MANY), seed=1)
    assert np.allclose(np.bincount(drawn, minlength=4) / len(MANY), [0, 2 / 3, 1 / 3, 0], atol=0.01)
    assert not np.any(draw_confused(np.eye(4)[MANY], MANY, seed=1) == MANY), "not even by a network that is certain"


def test_planting_replaces_the_given_share_of_labels() -> None:
    wrong = draw_uniform(MANY, 4, seed=1)
    planted = plant(MANY, wrong, 0.1, seed=2)
    changed = planted != MANY
    assert changed.sum() == 2000
    assert np.array_equal(planted[changed], wrong[changed])
    assert not np.array_equal(planted, plant(MANY, wrong, 0.1, seed=3))
