"""Calibrated probabilities: a temperature, and proper scores of the probabilities with bootstrap intervals.

Temperature scaling divides the logits by one number, which is fitted on a split that the network was not trained on. It
changes no prediction (C. Guo et al., arXiv 1706.04599, section 4.2). NumPy on the host, in float64; `log_softmax` and
`log_mean_softmax` also take JAX arrays, so that the exported program computes what is evaluated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.common.intervals import Interval, pivotal_intervals

LOWEST, HIGHEST = 0.05, 20.0  # bounds of a temperature: beyond them a split is separated perfectly, or is noise
_HALVINGS = 40
_DRAWS = 1000  # resamples of an interval

Probabilities = Float[np.ndarray, "examples classes"]
Labels = Int[np.ndarray, " examples"]


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Confidence (the highest probability) against accuracy, in bins."""

    count: Int[np.ndarray, " bins"]  # number of examples in the bin
    confidence: Float[np.ndarray, " bins"]  # mean highest probability; NaN in an empty bin
    accuracy: Float[np.ndarray, " bins"]  # share of correct predictions; NaN in an empty bin

    @property
    def expected_calibration_error(self) -> float:
        """Calibration error of these bins, see `calibration_error`."""
        return calibration_error(np.nan_to_num(self.count * (self.confidence - self.accuracy)), int(self.count.sum()))


def calibration_error(gaps: Float[np.ndarray, " bins"], num_examples: int) -> float:
    """Return the mean of |accuracy - confidence| weighted by count (Guo et al., arXiv 1706.04599, equation 3).

    Args:
        gaps: sum of the confidences minus the number of correct predictions, by bin.
        num_examples: number of examples in all bins, at least 1.
    """
    return float(np.abs(gaps).sum() / num_examples)


def log_softmax(logits: Any) -> Any:
    """Return the logarithm of the softmax over the last axis, as an array of the same kind and precision."""
    xp = logits.__array_namespace__()
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def log_mean_softmax(logits: Any) -> Any:
    """Return the logarithm of the mean softmax of several networks, which is also a logit of their ensemble.

    Probabilities are not formed, since they could underflow: with a temperature above 1 the smallest ones matter.
    Source: B. Lakshminarayanan, A. Pritzel, C. Blundell, arXiv 1612.01474, section 2.4.

    Args:
        logits: array (networks, examples, classes) of NumPy or JAX.
    """
    xp, logs = logits.__array_namespace__(), log_softmax(logits)
    largest = xp.max(logs, axis=0, keepdims=True)
    return largest[0] + xp.log(xp.mean(xp.exp(logs - largest), axis=0))


def fit_temperature(logits: Float[np.ndarray, "*networks examples classes"], labels: Labels) -> float:
    """Return the temperature from 0.05 to 20 with the lowest mean cross-entropy.

    The mean cross-entropy is convex in β = 1 / temperature; its derivative is the mean of Σ p(β) z - z[label] with
    logits z, so bisection finds its root.

    Args:
        logits: logits by one network or several that were not trained on the examples.
    """
    logits = log_softmax(logits.astype(np.float64))
    index = np.broadcast_to(labels, logits.shape[:-1])[..., None]
    label_logit = np.mean(np.take_along_axis(logits, index, axis=-1))

    def slope(beta: float) -> float:
        return float(np.mean(np.sum(np.exp(log_softmax(beta * logits)) * logits, axis=-1)) - label_logit)

    low, high = 1 / HIGHEST, 1 / LOWEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 2 / (low + high)


def brier_score(probabilities: Probabilities, labels: Labels) -> Float[np.ndarray, " examples"]:
    """Return ‖p - onehot(label)‖² of each example, 0 to 2 (G. Brier, Monthly Weather Review 78, 1950)."""
    errors = probabilities.astype(np.float64)
    errors[np.arange(len(labels)), labels] -= 1
    return np.sum(errors**2, axis=1)


def bins_of_equal_width(confidence: Float[np.ndarray, " examples"], num_bins: int) -> Int[np.ndarray, " examples"]:
    """Return the bin of each example; the bins divide 0..1 evenly."""
    return np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)


def bins_of_equal_mass(confidence: Float[np.ndarray, " examples"], num_bins: int) -> Int[np.ndarray, " examples"]:
    """Return the bin of each example; each bin has as many examples as any other, or one more.

    Equal confidences are ordered by position.
    """
    rank = np.empty(len(confidence), np.int64)
    rank[np.argsort(confidence, kind="stable")] = np.arange(len(confidence))
    return rank * min(num_bins, len(confidence)) // len(confidence)


def fill_bins(
    bins: Int[np.ndarray, " examples"], confidence: np.ndarray, is_correct: np.ndarray, num_bins: int
) -> Bins:
    """Return the mean confidence and the accuracy of each bin."""
    count = np.bincount(bins, minlength=num_bins)

    def mean(values: np.ndarray) -> np.ndarray:
        sums = np.bincount(bins, weights=values.astype(np.float64), minlength=num_bins)
        return np.where(count > 0, sums / np.maximum(count, 1), np.nan)

    return Bins(count=count, confidence=mean(confidence), accuracy=mean(is_correct))


def score(probabilities: Probabilities, loss: np.ndarray, labels: Labels, num_bins: int) -> Mapping[str, Interval]:
    """Return scores of probabilities with their pivotal intervals over resampled examples.

    Returns:
        `loss`, the mean cross-entropy in nats; `brier`; `expected_calibration_error` in bins of equal width, and
        `expected_calibration_error_equal_mass`.
    """
    size, confidence = len(labels), probabilities.max(axis=1).astype(np.float64)
    gap = confidence - (probabilities.argmax(axis=1) == labels)
    means = np.stack([loss.astype(np.float64), brier_score(probabilities, labels)])
    bins = [bins_of_equal_width(confidence, num_bins), bins_of_equal_mass(confidence, num_bins)]

    def resampled_scores(count: np.ndarray) -> list[float]:
        gaps = [np.bincount(number, weights=gap * count, minlength=num_bins) for number in bins]
        return [*np.sum(means * count, axis=1) / size, *(calibration_error(number, size) for number in gaps)]

    draw = np.random.default_rng(0)
    values = np.array(resampled_scores(np.ones(size)))
    drawn = [resampled_scores(np.bincount(draw.integers(size, size=size), minlength=size)) for _ in range(_DRAWS)]
    names = ("loss", "brier", "expected_calibration_error", "expected_calibration_error_equal_mass")
    highest = np.array([np.inf, 2, 1, 1])
    return dict(zip(names, pivotal_intervals(values, np.array(drawn), highest), strict=True))
