"""The losses against Optax, SciPy, closed forms and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from gradtrail.core.nn import losses

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 3, (8, 5)).astype(np.float32)
LABELS = RNG.integers(0, 5, 8).astype(np.int32)
ONEHOT = np.eye(5)[LABELS]
SMOOTHINGS = [0.0, 0.1, 0.9]


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_cross_entropy_equals_its_formula_in_float64(smoothing: float) -> None:
    targets = (1 - smoothing) * ONEHOT + smoothing / 5
    expected = -np.sum(targets * scipy.special.log_softmax(LOGITS.astype(np.float64), axis=1), axis=1)
    ours = losses.cross_entropy(jnp.asarray(LOGITS), jnp.asarray(LABELS), label_smoothing=smoothing)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_the_gradient_is_softmax_less_target_and_agrees_with_finite_differences(smoothing: float) -> None:
    with jax.enable_x64(True):
        logits, labels = jnp.asarray(LOGITS, jnp.float64), jnp.asarray(LABELS)

        def total(logits: jax.Array) -> jax.Array:
            return jnp.sum(losses.cross_entropy(logits, labels, label_smoothing=smoothing))

        gradient = np.asarray(jax.grad(total)(logits))
        direction = jnp.asarray(RNG.normal(size=LOGITS.shape))
        difference = (total(logits + 1e-5 * direction) - total(logits - 1e-5 * direction)) / 2e-5
    np.testing.assert_allclose(np.sum(gradient * np.asarray(direction)), difference, rtol=1e-6)
    targets = (1 - smoothing) * ONEHOT + smoothing / 5
    np.testing.assert_allclose(gradient, scipy.special.softmax(LOGITS, axis=1) - targets, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits = jnp.array([[1000.0, 0.0], [-1000.0, 0.0]])
    np.testing.assert_allclose(losses.cross_entropy(logits, jnp.array([1, 0])), [1000.0, 1000.0])


def test_el2n_equals_its_formula() -> None:
    expected = np.linalg.norm(scipy.special.softmax(LOGITS, axis=1) - ONEHOT, axis=1)
    np.testing.assert_allclose(losses.el2n(jnp.asarray(LOGITS), jnp.asarray(LABELS)), expected, rtol=1e-5)


def test_margin_is_the_label_over_the_best_other() -> None:
    expected = [row[label] - max(np.delete(row, label)) for row, label in zip(LOGITS, LABELS, strict=True)]
    np.testing.assert_allclose(losses.margin(jnp.asarray(LOGITS), jnp.asarray(LABELS)), expected, rtol=1e-6)
