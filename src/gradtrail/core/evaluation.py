"""What the predictions for a split come to; NumPy on the host."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core import classification
from gradtrail.core.bounds import MAX_PICTURES, check
from gradtrail.core.classification import PerClass, Reliability
from gradtrail.core.models import WeightsKind


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The section `evaluate` of `params.yaml`.

    Attributes:
        weights: of the last epoch, or of the one with the best validation accuracy; the best may differ by machine.
        batch_size: examples at a time.
        calibration_bins: bins of the reliability diagram.
        num_mistakes: in the gallery.
    """

    weights: WeightsKind
    batch_size: int
    calibration_bins: int
    num_mistakes: int

    def __post_init__(self) -> None:
        check("batch_size", self.batch_size, at_least=1)
        check("calibration_bins", self.calibration_bins, at_least=1)
        check("num_mistakes", self.num_mistakes, at_least=1, at_most=MAX_PICTURES)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of a model over a split.

    Attributes:
        probabilities: softmax of the logits.
        example_loss: cross-entropy in nats, without label smoothing.
        confusion: examples of each label (row) that were predicted as each class (column).
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
        """Indices of wrong predictions, the most certain first; equal ones in order."""
        wrong = np.flatnonzero(self.predicted != self.labels)
        return wrong[np.argsort(-self.probability[wrong], kind="stable")]

    def metrics(self) -> dict[str, float]:
        """Return the figures as flat metrics; the interval of the accuracy is Wilson's, 95 %. Classes are averaged."""
        num_examples = len(self.labels)
        num_correct = num_examples - len(self.mistakes)
        low, high = classification.wilson_interval(num_correct, num_examples)
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


def evaluate(
    probabilities: Float[np.ndarray, "examples classes"],
    loss: Float[np.ndarray, " examples"],
    labels: Int[np.ndarray, " examples"],
    *,
    calibration_bins: int,
) -> Evaluation:
    """Sum up the predictions of a split, in the order of its examples."""
    predicted, confidence = np.argmax(probabilities, axis=1), np.max(probabilities, axis=1)
    confusion = classification.confusion_matrix(labels, predicted, probabilities.shape[1])
    return Evaluation(
        labels=labels,
        probabilities=probabilities,
        example_loss=loss,
        confusion=confusion,
        per_class=classification.per_class(confusion),
        reliability=classification.reliability(confidence, predicted == labels, calibration_bins),
    )
