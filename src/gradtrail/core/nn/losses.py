"""Losses to minimize, and other metrics of a prediction: one value per example, in nats; the caller reduces.

A loss is a config with `per_example(logits, labels)`, and `per_class(logits)` for each class in place of the label.
"""

import dataclasses
from typing import ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gradtrail.core.config import LARGEST, Bounds, ConfigError, NotNegative, Share, config


@config
class _Loss:
    """What the losses have in common: the loss of an example is multiplied by the weight of its class."""

    kind: ClassVar[str]
    # a number for each class, None for 1, or `balanced`: all examples / (classes * examples of the class), as in
    # scikit-learn. `for_labels` makes numbers of it; until then it counts as None.
    class_weights: Literal["balanced"] | tuple[float, ...] | None = None

    def check(self) -> None:
        if isinstance(self.class_weights, tuple):
            for weight in self.class_weights:
                Bounds(above=0, at_most=LARGEST).check("class_weights", weight)

    def per_example(
        self, logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]
    ) -> Float[Array, " batch"]:
        """Return the loss of each example."""
        losses, weights = self._per_example(logits, labels), self._weights
        return losses if weights is None else losses * weights[labels]

    def per_class(self, logits: Float[Array, "batch classes"]) -> Float[Array, "batch classes"]:
        """Return the loss of each example with each class in place of its label."""
        losses, weights = self._per_class(logits), self._weights
        return losses if weights is None else losses * weights[None]

    @property
    def _weights(self) -> Float[Array, " classes"] | None:
        return jnp.array(self.class_weights, jnp.float32) if isinstance(self.class_weights, tuple) else None

    def _per_example(
        self, logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]
    ) -> Float[Array, " batch"]:
        raise NotImplementedError

    def _per_class(self, logits: Float[Array, "batch classes"]) -> Float[Array, "batch classes"]:
        classes = jnp.arange(logits.shape[1], dtype=jnp.int32)
        same = jnp.broadcast_to(classes[:, None], logits.shape[::-1])
        return jax.vmap(self._per_example, (None, 0), out_axes=1)(logits, same)


@config
class CrossEntropy(_Loss):
    """Cross-entropy of the softmax with the labels.

    The target is `(1 - s) onehot(label) + s / classes` for label smoothing `s` (Szegedy et al., arXiv 1512.00567).
    """

    kind: ClassVar = "cross_entropy"
    label_smoothing: Share

    def _per_example(
        self, logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]
    ) -> Float[Array, " batch"]:
        if not self.label_smoothing:
            return cross_entropy(logits, labels)
        log_probabilities = jax.nn.log_softmax(logits)
        of_label = _of_label(log_probabilities, labels)
        return -(1.0 - self.label_smoothing) * of_label - self.label_smoothing * jnp.mean(log_probabilities, axis=1)

    def _per_class(self, logits: Float[Array, "batch classes"]) -> Float[Array, "batch classes"]:
        log_probabilities = jax.nn.log_softmax(logits)
        mean = jnp.mean(log_probabilities, axis=1, keepdims=True)
        return -(1.0 - self.label_smoothing) * log_probabilities - self.label_smoothing * mean


@config
class Focal(_Loss):
    """Focal loss, -(1 - p)^γ ln p for the label's probability p (Lin et al., arXiv 1708.02002).

    Computed from the log-odds of p: its gradient is finite for every p, 1 included.
    """

    kind: ClassVar = "focal"
    gamma: NotNegative  # 0 for the cross-entropy

    def _per_example(
        self, logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]
    ) -> Float[Array, " batch"]:
        odds = log_odds(logits, labels)
        return -jnp.exp(self.gamma * jax.nn.log_sigmoid(-odds)) * jax.nn.log_sigmoid(odds)


Loss: TypeAlias = CrossEntropy | Focal

CROSS_ENTROPY = CrossEntropy(label_smoothing=0.0)


def for_labels(loss: Loss, labels: Int[np.ndarray, " examples"], num_classes: int) -> Loss:
    """Return the loss with its weights for these labels; raise ConfigError unless each class has one."""
    weights = loss.class_weights
    if weights == "balanced":
        counts = np.maximum(1, np.bincount(labels, minlength=num_classes))
        weights = tuple((len(labels) / (num_classes * counts)).tolist())
    if weights is not None and len(weights) != num_classes:
        raise ConfigError(
            f"train.{loss.kind}.class_weights must have {num_classes} numbers, one for each class, got {len(weights)}"
        )
    return dataclasses.replace(loss, class_weights=weights)


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
