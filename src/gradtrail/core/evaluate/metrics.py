"""Metrics of a classifier over a split, from its predictions: accuracy, calibration, per class; NumPy on the host."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.common.intervals import Interval, share_interval
from gradtrail.core.common.validation import AT_LEAST_ONE, check_fields
from gradtrail.core.config import MAX_GALLERY
from gradtrail.core.evaluate import calibration
from gradtrail.core.evaluate.calibration import Bins
from gradtrail.core.nn.models import WeightsKind

Labels = Int[np.ndarray, " examples"]


@dataclass(frozen=True, kw_only=True)
class PerClass:
    """Precision, recall and F1 of each class, float64; 0 if the denominator is 0."""

    precision: Float[np.ndarray, " classes"]
    recall: Float[np.ndarray, " classes"]
    f1: Float[np.ndarray, " classes"]


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


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The section `evaluate` of `params.yaml`."""

    weights: WeightsKind  # weights of the last epoch, or of the one with the best validation accuracy
    batch_size: int  # number of examples per call of the model
    calibration_bins: int  # number of bins of the reliability diagram
    num_mistakes: int  # number of images in the gallery of mistakes

    def __post_init__(self) -> None:
        check_fields(
            self,
            batch_size=AT_LEAST_ONE,
            calibration_bins={"at_least": 1, "at_most": 10_000},
            num_mistakes={"at_least": 1, "at_most": MAX_GALLERY},
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Predictions and metrics of a model over a split."""

    labels: Int[np.ndarray, " examples"]  # given class of each example
    predicted: Int[np.ndarray, " examples"]  # most probable class of each example
    probabilities: Float[np.ndarray, "examples classes"]  # calibrated probabilities, float32
    example_loss: Float[np.ndarray, " examples"]  # cross-entropy of the calibrated probabilities in nats, float32
    temperature: float  # divisor of the logits
    # number of examples of each label (row) that were predicted as each class (column)
    confusion: Int[np.ndarray, "classes classes"]
    per_class: PerClass  # precision, recall and F1
    reliability: Bins  # confidence against accuracy, calibrated
    reliability_uncalibrated: Bins  # the same bins at temperature 1
    # loss, Brier score and calibration errors of the calibrated probabilities, with intervals
    scores: Mapping[str, Interval]
    scores_uncalibrated: Mapping[str, Interval]  # the same scores at temperature 1

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
        accuracy = share_interval(num_correct, num_examples)
        return {
            "accuracy": accuracy.value,
            "accuracy_low": accuracy.low,
            "accuracy_high": accuracy.high,
            "loss": self.scores["loss"].value,
            "loss_uncalibrated": self.scores_uncalibrated["loss"].value,
            "brier": self.scores["brier"].value,
            "expected_calibration_error": self.scores["expected_calibration_error"].value,
            "expected_calibration_error_uncalibrated": self.scores_uncalibrated["expected_calibration_error"].value,
            "temperature": self.temperature,
            "num_examples": num_examples,
            "num_mistakes": len(self.mistakes),
            "precision_macro": float(np.mean(self.per_class.precision)),
            "recall_macro": float(np.mean(self.per_class.recall)),
            "f1_macro": float(np.mean(self.per_class.f1)),
        }


def corrected_metrics(predicted: Labels, labels: Labels, corrected: Labels) -> dict[str, float]:
    """Return the accuracy by corrected labels with Wilson's 95 % interval; empty if no label was corrected.

    Args:
        predicted: class of each example.
        labels: given class, for the first accuracy.
        corrected: class after corrections.
    """
    if np.array_equal(labels, corrected):
        return {}
    accuracy = share_interval(int(np.sum(predicted == corrected)), len(corrected))
    return {
        "accuracy_corrected_labels": accuracy.value,
        "accuracy_corrected_labels_low": accuracy.low,
        "accuracy_corrected_labels_high": accuracy.high,
    }


def evaluate(
    logits: Float[np.ndarray, "examples classes"],
    labels: Int[np.ndarray, " examples"],
    *,
    temperature: float,
    calibration_bins: int,
) -> Evaluation:
    """Evaluate the predictions of a split.

    Args:
        logits: logits of each example in the order of the split.
        labels: class of each example.
        temperature: temperature fitted on another split.
        calibration_bins: number of bins of the reliability diagrams.
    """
    predicted = np.argmax(logits, axis=1)  # rounding may make two calibrated probabilities equal
    confusion = confusion_matrix(labels, predicted, logits.shape[1])
    logs = [calibration.log_softmax(logits.astype(np.float64) / divisor) for divisor in (temperature, 1.0)]
    loss, loss_uncalibrated = (-log_probabilities[np.arange(len(labels)), labels] for log_probabilities in logs)
    calibrated, uncalibrated = (np.exp(log_probabilities).astype(np.float32) for log_probabilities in logs)

    def reliability(probabilities: Float[np.ndarray, "examples classes"]) -> Bins:
        confidence = np.max(probabilities, axis=1)
        bins = calibration.bins_of_equal_width(confidence, calibration_bins)
        return calibration.fill_bins(bins, confidence, predicted == labels, calibration_bins)

    return Evaluation(
        labels=labels,
        predicted=predicted,
        probabilities=calibrated,
        example_loss=loss.astype(np.float32),
        temperature=temperature,
        confusion=confusion,
        per_class=per_class(confusion),
        reliability=reliability(calibrated),
        reliability_uncalibrated=reliability(uncalibrated),
        scores=calibration.score(calibrated, loss, labels, calibration_bins),
        scores_uncalibrated=calibration.score(uncalibrated, loss_uncalibrated, labels, calibration_bins),
    )
