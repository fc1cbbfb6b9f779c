"""Losses and other metrics of a prediction, one value per example; the caller reduces."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def cross_entropy(
    logits: Float[Array, "batch classes"], labels: Int[Array, " batch"], *, label_smoothing: float = 0.0
) -> Float[Array, " batch"]:
    """Return the cross-entropy of the softmax with the labels, in nats.

    The target is `(1 - s) onehot(label) + s / classes` for label smoothing `s` (Szegedy et al., arXiv 1512.00567).

    >>> cross_entropy(jnp.zeros((1, 4)), jnp.array([2])).round(4)
    Array([1.3863], dtype=float32)
    """
    log_probabilities = jax.nn.log_softmax(logits)
    label_log_probability = jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0]
    if not label_smoothing:
        return -label_log_probability
    return -(1.0 - label_smoothing) * label_log_probability - label_smoothing * jnp.mean(log_probabilities, axis=1)


def cross_entropies(logits: Float[Array, "batch classes"], *, label_smoothing: float) -> Float[Array, "batch classes"]:
    """Return the cross-entropy with each class as the label, in nats."""
    log_probabilities = jax.nn.log_softmax(logits)
    mean = jnp.mean(log_probabilities, axis=1, keepdims=True)
    return -(1.0 - label_smoothing) * log_probabilities - label_smoothing * mean


def correct(logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]) -> Bool[Array, " batch"]:
    """Return whether the largest logit is the label's."""
    return jnp.argmax(logits, axis=1) == labels


def label_probability(logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]) -> Float[Array, " batch"]:
    """Return the softmax probability of the label."""
    return jnp.exp(-cross_entropy(logits, labels))


def entropy(logits: Float[Array, "batch classes"]) -> Float[Array, " batch"]:
    """Return the entropy of the softmax, in nats: 0 for a certain prediction, ln(classes) for a uniform one."""
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=1)


def el2n(logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]) -> Float[Array, " batch"]:
    """Return the error L2 norm: ‖softmax(logits) - onehot(label)‖₂ (Paul et al., arXiv 2107.07075, definition 2.3)."""
    error = jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
    return jnp.linalg.norm(error, axis=1)


def margin(logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]) -> Float[Array, " batch"]:
    """Return the label's logit minus the largest other logit: negative if the prediction is wrong."""
    is_label = jax.nn.one_hot(labels, logits.shape[1], dtype=bool)
    label_logit = jnp.sum(jnp.where(is_label, logits, 0.0), axis=1)
    return label_logit - jnp.max(jnp.where(is_label, -jnp.inf, logits), axis=1)
