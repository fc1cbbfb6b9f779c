"""Losses to minimize, and other metrics of a prediction: one value per example, in nats; the caller reduces.

A loss is a config with `per_example(logits, labels)`, and `per_class(logits)` for each class in place of the label.
"""

from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gradtrail.core.config import Share, config


@config
class CrossEntropy:
    """Cross-entropy of the softmax with the labels.

    The target is `(1 - s) onehot(label) + s / classes` for label smoothing `s` (Szegedy et al., arXiv 1512.00567).
    """

    kind: ClassVar = "cross_entropy"
    label_smoothing: Share

    def per_example(
        self, logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]
    ) -> Float[Array, " batch"]:
        if not self.label_smoothing:
            return cross_entropy(logits, labels)
        log_probabilities = jax.nn.log_softmax(logits)
        of_label = _of_label(log_probabilities, labels)
        return -(1.0 - self.label_smoothing) * of_label - self.label_smoothing * jnp.mean(log_probabilities, axis=1)

    def per_class(self, logits: Float[Array, "batch classes"]) -> Float[Array, "batch classes"]:
        log_probabilities = jax.nn.log_softmax(logits)
        mean = jnp.mean(log_probabilities, axis=1, keepdims=True)
        return -(1.0 - self.label_smoothing) * log_probabilities - self.label_smoothing * mean


Loss: TypeAlias = CrossEntropy

CROSS_ENTROPY = CrossEntropy(label_smoothing=0.0)


def cross_entropy(logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]) -> Float[Array, " batch"]:
    """Return the cross-entropy of the softmax with the labels.

    >>> cross_entropy(jnp.zeros((1, 4)), jnp.array([2])).round(4)
    Array([1.3863], dtype=float32)
    """
    return -_of_label(jax.nn.log_softmax(logits), labels)


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


def log_odds(logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]) -> Float[Array, " batch"]:
    """Return the margin of the label: its logit minus log Σ exp of the other logits, in nats.

    This is log(p / (1 - p)) of the label's probability p, positive if p is above one half.

    >>> log_odds(jnp.zeros((1, 3)), jnp.array([0])).round(4)
    Array([-0.6931], dtype=float32)
    """
    is_label = jax.nn.one_hot(labels, logits.shape[1], dtype=bool)
    log_sum = jax.nn.logsumexp(jnp.where(is_label, -jnp.inf, logits), axis=1)
    return jnp.sum(jnp.where(is_label, logits, 0.0), axis=1) - log_sum


def margin(logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]) -> Float[Array, " batch"]:
    """Return the label's logit minus the largest other logit: negative if the prediction is wrong."""
    is_label = jax.nn.one_hot(labels, logits.shape[1], dtype=bool)
    label_logit = jnp.sum(jnp.where(is_label, logits, 0.0), axis=1)
    return label_logit - jnp.max(jnp.where(is_label, -jnp.inf, logits), axis=1)


def _of_label(by_class: Float[Array, "batch classes"], labels: Int[Array, " batch"]) -> Float[Array, " batch"]:
    return jnp.take_along_axis(by_class, labels[:, None], axis=1)[:, 0]
