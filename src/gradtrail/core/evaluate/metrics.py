"""Metrics of a classifier over a split, from its predictions: accuracy, calibration, per class; NumPy on the host."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from gradtrail.core.common.validation import AT_LEAST_ONE, MAX_GALLERY, check_fields
from gradtrail.core.nn.models import WeightsKind

Labels = Int[np.ndarray, " examples"]


@dataclass(frozen=True, kw_only=True)
class PerClass:
    """Precision, recall and F1 of each class, float64; 0 where the denominator is 0."""

    precision: Float[np.ndarray, " classes"]
    recall: Float[np.ndarray, " classes"]
    f1: Float[np.ndarray, " classes"]


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Confidence and accuracy in bins of equal width over 0..1.

    Attributes:
        count: examples whose highest probability falls into the bin.
        confidence: their mean highest probability; NaN in an empty bin.
        accuracy: their share of correct predictions; NaN in an empty bin.
    """

    count: Int[np.ndarray, " bins"]
    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]

    @property
    def expected_calibration_error(self) -> float:
        """Mean of |accuracy - confidence| weighted by count (Guo et al., arXiv 1706.04599, equation 3)."""
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
    """Bin examples by their highest probability.

    Args:
        confidence: highest probability of each example, 0..1.
        is_correct: whether its class is the label.
        num_bins: bins of equal width.
    """
    bins = np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)
    count = np.bincount(bins, minlength=num_bins)

    def mean_in_bin(values: np.ndarray) -> np.ndarray:
        sums = np.bincount(bins, weights=values.astype(np.float64), minlength=num_bins)
        return np.where(count > 0, sums / np.maximum(count, 1), np.nan)

    return Reliability(count=count, confidence=mean_in_bin(confidence), accuracy=mean_in_bin(is_correct))


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The section `evaluate` of `params.yaml`.

    Attributes:
        weights: of the last epoch, or of the one with the best validation accuracy.
        batch_size: examples per call of the model.
        calibration_bins: bins of the reliability diagram.
        num_mistakes: images in the gallery of mistakes.
    """

    weights: WeightsKind
    batch_size: int
    calibration_bins: int
    num_mistakes: int

    def __post_init__(self) -> None:
        check_fields(
            self,
            batch_size=AT_LEAST_ONE,
            calibration_bins={"at_least": 1, "at_most": 10_000},
            num_mistakes={"at_least": 1, "at_most": MAX_GALLERY},
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Predictions and metrics of a model over a split.

    Attributes:
        labels: given class of each example.
        probabilities: softmax of the logits, float32.
        example_loss: cross-entropy in nats, without label smoothing.
        confusion: number of examples of each label (row) that were predicted as each class (column).
        per_class: precision, recall and F1.
        reliability: confidence against accuracy.
    """

    labels: Int[np.ndarray, " examples"]
    probabilities: Float[np.ndarray, "examples classes"]
    example_loss: Float[np.ndarray, " examples"]
    confusion: Int[np.ndarray, "classes classes"]
    per_class: PerClass
    reliability: Reliability

    @property
    def predicted(self) -> Int[np.ndarray, " examples"]:
        """Most probable class of each example."""
        return np.argmax(self.probabilities, axis=1)

    @property
    def probability(self) -> Float[np.ndarray, " examples"]:
        """Probability of the predicted class."""
        return np.max(self.probabilities, axis=1)

    @property
    def mistakes(self) -> Int[np.ndarray, " mistakes"]:
        """Indices of wrong predictions by descending probability, ties by ascending index."""
        wrong = np.flatnonzero(self.predicted != self.labels)
        return wrong[np.argsort(-self.probability[wrong], kind="stable")]

    def metrics(self) -> dict[str, float]:
        """Return flat metrics: accuracy with Wilson's 95 % interval, loss in nats, calibration, class averages."""
        num_examples = len(self.labels)
        num_correct = num_examples - len(self.mistakes)
        low, high = wilson_interval(num_correct, num_examples)
        return {
            "accuracy": num_correct / num_examples,
            "accuracy_low": low,
            "accuracy_high": high,
            "loss": float(np.mean(self.example_loss, dtype=np.float64)),
            "expected_calibration_error": self.reliability.expected_calibration_error,
            "num_examples": num_examples,
            "num_mistakes": len(self.mistakes),
            "precision_macro": float(np.mean(self.per_class.precision)),
            "recall_macro": float(np.mean(self.per_class.recall)),
            "f1_macro": float(np.mean(self.per_class.f1)),
        }


def corrected_metrics(predicted: Labels, labels: Labels, corrected: Labels) -> dict[str, float]:
    """Return the accuracy by corrected labels with Wilson's 95 % interval; nothing where no label was corrected.

    Args:
        predicted: class of each example.
        labels: given class, by which the first accuracy is.
        corrected: class after corrections.
    """
    if np.array_equal(labels, corrected):
        return {}
    hits = int(np.sum(predicted == corrected))
    low, high = wilson_interval(hits, len(corrected))
    return {
        "accuracy_corrected_labels": hits / len(corrected),
        "accuracy_corrected_labels_low": low,
        "accuracy_corrected_labels_high": high,
    }


def evaluate(
    probabilities: Float[np.ndarray, "examples classes"],
    loss: Float[np.ndarray, " examples"],
    labels: Int[np.ndarray, " examples"],
    *,
    calibration_bins: int,
) -> Evaluation:
    """Evaluate the predictions of a split, given in the order of its examples, with `calibration_bins` bins."""
    predicted, confidence = np.argmax(probabilities, axis=1), np.max(probabilities, axis=1)
    confusion = confusion_matrix(labels, predicted, probabilities.shape[1])
    return Evaluation(
        labels=labels,
        probabilities=probabilities,
        example_loss=loss,
        confusion=confusion,
        per_class=per_class(confusion),
        reliability=reliability(confidence, predicted == labels, calibration_bins),
    )
