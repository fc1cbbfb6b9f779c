"""Scores of labels against their definitions, and the temperature against a search over a grid."""

import jax.numpy as jnp
import numpy as np
import pytest

from gradtrail.core.audit.scores import CANDIDATES, fit_temperature, label_scores, probabilities
from gradtrail.core.nn import losses

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(scale=3, size=(3, 50, 4)).astype(np.float32)
LABELS = RNG.integers(0, 4, 50).astype(np.int32)


def test_scores_of_one_network_are_those_of_the_losses() -> None:
    scores = label_scores(LOGITS[:1], LABELS, 1.0)
    assert np.allclose(scores["el2n"], losses.el2n(jnp.array(LOGITS[0]), jnp.array(LABELS)), atol=1e-5)
    assert np.allclose(scores["log_margin"], -losses.margin(jnp.array(LOGITS[0]), jnp.array(LABELS)), atol=1e-5)
    result = 1 - losses.label_probability(jnp.array(LOGITS[0]), jnp.array(LABELS))
    assert np.allclose(scores["self_confidence"], result, atol=1e-5)
    assert np.array_equal(scores["disagreement"], ~losses.correct(jnp.array(LOGITS[0]), jnp.array(LABELS)))


def test_margin_of_several_networks_is_that_of_the_mean_probability() -> None:
    mean = probabilities(LOGITS, 2.0).mean(axis=0)
    for row, (score, label) in enumerate(zip(label_scores(LOGITS, LABELS, 2.0)["margin"], LABELS, strict=True)):
        assert score == pytest.approx(np.delete(mean[row], label).max() - mean[row, label])


def test_odds_are_bayes_rule_for_the_two_kinds_of_noise() -> None:
    mean = probabilities(LOGITS, 1.0).mean(axis=0)
    for row, (score, y) in enumerate(zip(label_scores(LOGITS, LABELS, 1.0)["odds"], LABELS, strict=True)):
        p = mean[row]
        of_wrong = sum(p[j] * (1 / 3 + p[y] / (1 - p[j])) / 2 for j in range(4) if j != y)
        assert score == pytest.approx(np.log(of_wrong / p[y]))


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_less_probable_label_is_more_suspicious(name: str) -> None:
    logits = np.array([[[5.0, 1.0, -2.0]] * 3], np.float32)
    scores = label_scores(logits, np.array([0, 1, 2], np.int32), 1.0)[name]
    assert np.all(np.diff(scores) > 0) or (name == "disagreement" and list(scores) == [0, 1, 1])


def test_the_temperature_has_the_smallest_cross_entropy() -> None:
    drawn = np.array([RNG.choice(4, p=row) for row in probabilities(LOGITS[:1].repeat(60, axis=1), 2.5)[0]], np.int32)
    logits = LOGITS[:1].repeat(60, axis=1)
    result = fit_temperature(logits, drawn)

    def loss(temperature: float) -> float:
        return float(-np.mean(np.log(probabilities(logits, temperature)[0, np.arange(len(drawn)), drawn])))

    assert loss(result) <= min(loss(temperature) for temperature in np.geomspace(0.1, 10, 200)) + 1e-9
    assert result == pytest.approx(2.5, rel=0.15)
