"""Figures of a classifier over a whole split, from its predictions; NumPy on the host."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

Labels = Int[np.ndarray, " examples"]


@dataclass(frozen=True, kw_only=True)
class PerClass:
    """Figures of each class; 0 where a figure has nothing to divide by."""

    precision: Float[np.ndarray, " classes"]
    recall: Float[np.ndarray, " classes"]
    f1: Float[np.ndarray, " classes"]


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Confidence held against accuracy, in bins of equal width over 0..1.

    Attributes:
        count: examples whose highest probability falls into the bin.
        confidence: their mean highest probability; NaN in an empty bin.
        accuracy: their share of right predictions; NaN in an empty bin.
    """

    count: Int[np.ndarray, " bins"]
    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]

    @property
    def expected_calibration_error(self) -> float:
        """Mean gap between accuracy and confidence, weighted by count (Guo et al., arXiv 1706.04599, equation 3)."""
        gaps = np.abs(self.accuracy - self.confidence)
        return float(np.nansum(self.count * gaps) / self.count.sum())


def confusion_matrix(labels: Labels, predicted: Labels, num_classes: int) -> Int[np.ndarray, "classes classes"]:
    """Count the examples of each label (row) that were predicted as each class (column)."""
    return np.bincount(labels * num_classes + predicted, minlength=num_classes**2).reshape(num_classes, num_classes)


def per_class(confusion: Int[np.ndarray, "classes classes"]) -> PerClass:
    """Return precision, recall and F1 of each class from a confusion matrix."""
    hits = np.diagonal(confusion).astype(np.float64)
    precision = hits / np.maximum(confusion.sum(axis=0), 1)
    recall = hits / np.maximum(confusion.sum(axis=1), 1)
    f1 = 2 * hits / np.maximum(confusion.sum(axis=0) + confusion.sum(axis=1), 1)
    return PerClass(precision=precision, recall=recall, f1=f1)


def wilson_interval(hits: int, total: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Return the score interval of a proportion (Wilson 1927).

    Args:
        hits: number of successes.
        total: number of trials, at least 1.
        z: quantile of the normal distribution; the default gives 95 %.
    """
    share = hits / total
    centre = share + z**2 / (2 * total)
    spread = z * np.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return float((centre - spread) / (1 + z**2 / total)), float((centre + spread) / (1 + z**2 / total))


def reliability(
    confidence: Float[np.ndarray, " examples"], is_correct: Bool[np.ndarray, " examples"], num_bins: int
) -> Reliability:
    """Sort examples into `num_bins` bins by their highest probability."""
    bins = np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)
    count = np.bincount(bins, minlength=num_bins)

    def mean_in_bin(values: np.ndarray) -> np.ndarray:
        sums = np.bincount(bins, weights=values.astype(np.float64), minlength=num_bins)
        return np.where(count > 0, sums / np.maximum(count, 1), np.nan)

    return Reliability(count=count, confidence=mean_in_bin(confidence), accuracy=mean_in_bin(is_correct))
