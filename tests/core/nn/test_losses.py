"""Losses and other values of a prediction equal their formulas, in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp, softmax
from sklearn.utils.class_weight import compute_class_weight

from gradtrail.core.config import ConfigError
from gradtrail.core.nn import losses
from gradtrail.core.nn.losses import CrossEntropy, Focal, Loss

RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.normal(0, 3, (8, 5)).astype(np.float32), RNG.integers(0, 5, 8).astype(np.int32)
ROWS, LOG_P = np.arange(8), log_softmax(LOGITS.astype(np.float64), axis=1)
WEIGHTS = (0.5, 2.0, 1.0, 3.0, 0.1)
FORMULAS = {  # the loss with each class as the label
    CrossEntropy(label_smoothing=0.0): -LOG_P,
    CrossEntropy(label_smoothing=0.9, class_weights=WEIGHTS): (0.1 * LOG_P + 0.9 * LOG_P.mean(axis=1, keepdims=True))
    * -np.array(WEIGHTS),
    Focal(gamma=0.0): -LOG_P,
    Focal(gamma=2.0, class_weights=WEIGHTS): -np.array(WEIGHTS) * (1 - np.exp(LOG_P)) ** 2 * LOG_P,
}


@pytest.mark.parametrize("loss", FORMULAS, ids=str)
def test_losses_of_the_label_and_of_each_class_equal_the_formula(loss: Loss) -> None:
    both = jax.jit(lambda logits, labels: (loss.per_example(logits, labels), loss.per_class(logits)))
    of_label, by_class = both(LOGITS, LABELS)
    np.testing.assert_allclose(of_label, FORMULAS[loss][ROWS, LABELS], rtol=1e-4)
    np.testing.assert_allclose(by_class, FORMULAS[loss], rtol=1e-4)


def test_gradient_is_softmax_less_target_and_finite_for_a_certain_prediction() -> None:
    certain = np.array([[100, 0, 0], [-100, 0, 0]], np.float32)

    @jax.jit
    def grads(logits: jax.Array, labels: jax.Array, certain: jax.Array) -> list[jax.Array]:
        zeros = jnp.zeros(2, jnp.int32)
        cases = [(CrossEntropy(label_smoothing=0.9), logits, labels)]
        cases += [(Focal(gamma=gamma), certain, zeros) for gamma in (0.5, 2.0)]
        return [jax.grad(lambda x, case=case: jnp.sum(case[0].per_example(x, case[2])))(case[1]) for case in cases]

    smoothed, *focal = grads(LOGITS, LABELS, certain)
    targets = 0.1 * np.eye(5)[LABELS] + 0.9 / 5
    np.testing.assert_allclose(smoothed, softmax(LOGITS, axis=1) - targets, atol=1e-6)
    for result in focal:
        np.testing.assert_allclose(result, [[0, 0, 0], [-1, 0.5, 0.5]], atol=1e-6)


def test_cross_entropy_and_log_odds_of_any_prediction_equal_their_formulas() -> None:
    """Of certain ones too: no exponential overflows, no probability underflows."""
    logits = np.vstack([LOGITS, [[1000, 0, 0, 0, 0], [-1000, 0, 0, 0, 0], [60, 0, -90, -90, -90]]]).astype(np.float32)
    labels = np.append(LABELS, [1, 0, 0]).astype(np.int32)
    both = jax.jit(lambda *arguments: (losses.cross_entropy(*arguments), losses.log_odds(*arguments)))
    cross_entropy, log_odds = both(logits, labels)
    of_label, others = (
        np.where(np.eye(5)[labels] == shown, logits.astype(np.float64), -np.inf) for shown in (True, False)
    )
    expected = of_label.max(axis=1) - logsumexp(others, axis=1)
    np.testing.assert_allclose(log_odds, expected, rtol=1e-5)
    np.testing.assert_allclose(cross_entropy, np.logaddexp(0, -expected), rtol=1e-4, atol=1e-6)


def test_balanced_class_weights_are_those_of_scikit_learn() -> None:
    labels = np.append(LABELS, np.arange(5))
    expected = compute_class_weight("balanced", classes=np.arange(5), y=labels)
    loss = losses.for_labels(Focal(gamma=1.0, class_weights="balanced"), labels, 5)
    np.testing.assert_allclose(loss.class_weights, expected)
    assert losses.for_labels(loss, LABELS, 5) == loss
    assert losses.for_labels(losses.CROSS_ENTROPY, LABELS, 5) == losses.CROSS_ENTROPY
    with pytest.raises(ConfigError, match=r"^train\.focal\.class_weights must have 3 numbers, .* got 5$"):
        losses.for_labels(loss, LABELS, 3)
    with pytest.raises(ValueError, match=r"^class_weights must be above 0 and at most 1,000,000,000, got 0\.0$"):
        CrossEntropy(label_smoothing=0.0, class_weights=(1.0, 0.0))
