"""Evaluation of a classifier from its logits over a split: accuracy, classes, calibration; NumPy, in float64.

Temperature scaling divides the logits by one number, which is fitted on a split that the network was not trained on. It
changes no prediction (C. Guo et al., arXiv 1706.04599, section 4.2). `log_softmax` and `log_mean_softmax` also take JAX
arrays, so that the exported program computes what is evaluated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gradtrail.core.config import Bounds, Count, GallerySize, config
from gradtrail.core.data import are_unequal
from gradtrail.core.intervals import TAILS, Interval, bisect, mean_share_interval, pivotal_intervals, share_interval
from gradtrail.core.nn.models import WeightsKind

LOWEST, HIGHEST = 0.05, 20.0  # bounds of a temperature: beyond them a split is separated perfectly, or is noise
_DRAWS = 1000  # resamples of an interval
_UNKNOWN = Interval(value=np.nan, low=np.nan, high=np.nan)
_TOP, _MANY = 5, 10  # classes that `top_5_accuracy` accepts, if a data set has more than 10

Labels = Int[np.ndarray, " examples"]
Logits = Float[np.ndarray, "examples classes"]
Probabilities = Float[np.ndarray, "examples classes"]


@config
class EvaluateConfig:
    """The section `evaluate` of `params.yaml`."""

    weights: WeightsKind  # weights of the last epoch, or of the one with the best validation accuracy
    batch_size: Count  # largest number of examples per call of the model
    calibration_bins: Annotated[int, Bounds(at_least=1, at_most=10_000)]  # number of bins of the reliability diagram
    num_mistakes: GallerySize  # number of images in the gallery of mistakes


def log_softmax(logits: Any) -> Any:
    """Return the logarithm of the softmax over the last axis, as an array of the same kind and precision."""
    xp = logits.__array_namespace__()
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def log_mean_softmax(logits: Any) -> Any:
    """Return the logarithm of the mean softmax of several networks, which is also a logit of their ensemble.

    Probabilities are not formed, since they could underflow: with a temperature above 1 the smallest ones matter.
    Source: B. Lakshminarayanan, A. Pritzel, C. Blundell, arXiv 1612.01474, section 2.4.
    """
    xp, logs = logits.__array_namespace__(), log_softmax(logits)
    largest = xp.max(logs, axis=0, keepdims=True)
    return largest[0] + xp.log(xp.mean(xp.exp(logs - largest), axis=0))


def fit_temperature(logits: Float[np.ndarray, "*networks examples classes"], labels: Labels) -> float:
    """Return the temperature from 0.05 to 20 with the lowest mean cross-entropy on examples outside the training.

    The mean cross-entropy is convex in β = 1 / temperature; its derivative is the mean of Σ p(β) z - z[label] with
    logits z, so bisection finds its root.
    """
    logits = log_softmax(logits.astype(np.float64))
    index = np.broadcast_to(labels, logits.shape[:-1])[..., None]
    label_logit = np.mean(np.take_along_axis(logits, index, axis=-1))

    def slope(beta: float) -> float:
        return float(np.mean(np.sum(np.exp(log_softmax(beta * logits)) * logits, axis=-1)) - label_logit)

    return 1 / bisect(lambda beta: slope(beta) < 0, 1 / HIGHEST, 1 / LOWEST, halvings=40)


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Confidence (the highest probability) against accuracy, in bins."""

    count: Int[np.ndarray, " bins"]  # number of examples in the bin
    confidence: Float[np.ndarray, " bins"]  # mean highest probability; NaN in an empty bin
    accuracy: Float[np.ndarray, " bins"]  # share of correct predictions; NaN in an empty bin

    @property
    def expected_calibration_error(self) -> float:
        """Mean of |accuracy - confidence| weighted by count (Guo et al., arXiv 1706.04599, equation 3)."""
        return float(np.abs(np.nan_to_num(self.count * (self.confidence - self.accuracy))).sum() / self.count.sum())


def bins_of_equal_width(confidence: Float[np.ndarray, " examples"], num_bins: int) -> Int[np.ndarray, " examples"]:
    """Return the bin of each example; the bins divide 0..1 evenly."""
    return np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)


def bins_of_equal_mass(confidence: Float[np.ndarray, " examples"], num_bins: int) -> Int[np.ndarray, " examples"]:
    """Return the bin of each example; sizes of bins differ by at most one, and equal confidences keep their order."""
    rank = np.empty(len(confidence), np.int64)
    rank[np.argsort(confidence, kind="stable")] = np.arange(len(confidence))
    return rank * min(num_bins, len(confidence)) // len(confidence)


def fill_bins(confidence: np.ndarray, is_correct: np.ndarray, num_bins: int) -> Bins:
    """Return the mean confidence and the accuracy in bins of equal width."""
    bins = bins_of_equal_width(confidence, num_bins)
    count = np.bincount(bins, minlength=num_bins)

    def mean(values: np.ndarray) -> np.ndarray:
        sums = np.bincount(bins, weights=values.astype(np.float64), minlength=num_bins)
        return np.where(count > 0, sums / np.maximum(count, 1), np.nan)

    return Bins(count=count, confidence=mean(confidence), accuracy=mean(is_correct))


def auroc(score: Float[np.ndarray, " examples"], is_positive: Bool[np.ndarray, " examples"]) -> float:
    """Return the share of the pairs of a positive and a negative in which the positive has the higher score.

    Ties count half. NaN without positives or without negatives.
    """
    _, group = np.unique(score, return_inverse=True)
    positive, negative = (np.bincount(group, weights=chosen) for chosen in (is_positive, ~is_positive))
    pairs = positive.sum() * negative.sum()
    return float(np.sum(positive * (np.cumsum(negative) - negative / 2)) / pairs) if pairs else np.nan


Scorer = Callable[[Float[np.ndarray, " examples"]], list[float]]


def scorer(probabilities: Probabilities, loss: np.ndarray, labels: Labels, num_bins: int) -> Scorer:
    """Return the function from how often a resample has each example to its scores.

    They are the mean cross-entropy in nats; the Brier score, the mean ‖p - onehot(label)‖² (G. Brier, Monthly Weather
    Review 78, 1950); and the expected calibration error, in bins of equal width and in bins of equal mass.
    """
    size, confidence = len(labels), probabilities.max(axis=1).astype(np.float64)
    gap = confidence - (probabilities.argmax(axis=1) == labels)
    errors = probabilities.astype(np.float64)
    errors[np.arange(size), labels] -= 1
    means = np.stack([loss.astype(np.float64), np.sum(errors**2, axis=1)])
    bins = [bins_of_equal_width(confidence, num_bins), bins_of_equal_mass(confidence, num_bins)]

    def scores(count: np.ndarray) -> list[float]:
        gaps = [np.bincount(number, weights=gap * count, minlength=num_bins) for number in bins]
        return [*np.sum(means * count, axis=1) / size, *(float(np.abs(part).sum() / size) for part in gaps)]

    return scores


def score_intervals(scorers: Sequence[Scorer], size: int) -> list[dict[str, Interval]]:
    """Return the scores of each function over `size` examples, with pivotal intervals over the same resamples."""
    rng = np.random.default_rng(0)
    counts = (np.bincount(rng.integers(size, size=size), minlength=size) for _ in range(_DRAWS))
    resampled = np.array([[scores(count) for scores in scorers] for count in counts])
    names = ("loss", "brier", "expected_calibration_error", "expected_calibration_error_equal_mass")
    highest = np.array([np.inf, 2, 1, 1])
    return [
        dict(zip(names, pivotal_intervals(np.array(scores(np.ones(size))), resampled[:, number], highest), strict=True))
        for number, scores in enumerate(scorers)
    ]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Predictions and metrics of a model over a split."""

    labels: Labels  # given class of each example
    predicted: Labels  # most probable class of each example
    probabilities: Probabilities  # calibrated probabilities, float32
    example_loss: Float[np.ndarray, " examples"]  # cross-entropy of the calibrated probabilities in nats, float32
    temperature: float  # divisor of the logits
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

    @cached_property
    def confusion(self) -> Int[np.ndarray, "classes classes"]:
        """Number of examples of each label (row) that were predicted as each class (column)."""
        num_classes = self.probabilities.shape[1]
        pairs = np.bincount(self.labels * num_classes + self.predicted, minlength=num_classes**2)
        return pairs.reshape(num_classes, num_classes)

    @cached_property
    def f1_macro(self) -> Interval:
        """Mean F1 of the classes that have examples, with its interval by the percentile bootstrap.

        The confusion matrix of a resample is multinomial. Where few are wrong, a pivotal interval is too narrow.
        """
        cells, rng = np.nonzero(self.confusion), np.random.default_rng(0)
        counts, total = self.confusion[cells], len(self.labels)

        def score(counts: np.ndarray) -> float:
            matrix = np.zeros_like(self.confusion)
            matrix[cells] = counts
            num_labels, num_predicted = matrix.sum(axis=1), matrix.sum(axis=0)
            f1 = 2 * np.diagonal(matrix) / np.maximum(num_labels + num_predicted, 1)
            return float(np.mean(f1[num_labels > 0]))

        value = score(counts)
        low, high = np.quantile([score(rng.multinomial(total, counts / total)) for _ in range(_DRAWS)], TAILS)
        return Interval(value=value, low=min(float(low), value), high=max(float(high), value))

    @property
    def recalls(self) -> list[Interval]:
        """Share of each class's examples that were predicted as it, with Wilson's interval; NaN without examples."""
        shares = ((int(row[label]), int(row.sum())) for label, row in enumerate(self.confusion))
        return [share_interval(*share) if share[1] else _UNKNOWN for share in shares]

    @cached_property
    def per_class(self) -> dict[str, Float[np.ndarray, " classes"]]:
        """Precision (0 without predictions), recall, F1 and AUROC of each class; NaN for a class without examples.

        The AUROC is that of the class against all others, by its calibrated probability.
        """
        confusion = self.confusion
        hits = np.diagonal(confusion).astype(np.float64)
        num_predicted, num_labels = confusion.sum(axis=0), confusion.sum(axis=1)
        hits[num_labels == 0] = np.nan
        ends = np.array([(recall.low, recall.high) for recall in self.recalls]).T
        areas = [auroc(column, self.labels == label) for label, column in enumerate(self.probabilities.T)]
        return {
            "precision": hits / np.maximum(num_predicted, 1),
            "recall": hits / np.maximum(num_labels, 1),
            "recall_low": ends[0],
            "recall_high": ends[1],
            "f1": 2 * hits / np.maximum(num_predicted + num_labels, 1),
            "auroc": np.array(areas),
        }

    def metrics(self) -> dict[str, float]:
        """Return flat metrics: accuracy with Wilson's 95 % interval, loss in nats, calibration, means over classes.

        Classes without an example are in no mean. `balanced_accuracy`, the mean recall with its interval, is there if
        classes are unequal, and `top_5_accuracy` if there are more than 10.
        """
        metrics: dict[str, float] = {
            **share_metrics("accuracy", self.predicted == self.labels),
            "loss": self.scores["loss"].value,
            "loss_uncalibrated": self.scores_uncalibrated["loss"].value,
            "brier": self.scores["brier"].value,
            "expected_calibration_error": self.scores["expected_calibration_error"].value,
            "expected_calibration_error_uncalibrated": self.scores_uncalibrated["expected_calibration_error"].value,
            "temperature": self.temperature,
            "num_examples": len(self.labels),
            "num_mistakes": len(self.mistakes),
            **interval_metrics("f1_macro", self.f1_macro),
        }
        for name in ("precision", "recall", "auroc"):
            values = self.per_class[name]
            if (known := values[np.isfinite(values)]).size:
                metrics[f"{name}_macro"] = float(np.mean(known))
        if are_unequal(self.labels):
            known_recalls = [recall for recall in self.recalls if np.isfinite(recall.value)]
            metrics |= interval_metrics("balanced_accuracy", mean_share_interval(known_recalls))
        if self.probabilities.shape[1] > _MANY:
            likeliest = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :_TOP]
            metrics |= share_metrics(f"top_{_TOP}_accuracy", (likeliest == self.labels[:, None]).any(axis=1))
        return metrics


def interval_metrics(name: str, interval: Interval) -> dict[str, float]:
    """Return a number as `name`, and the ends of its interval as `name_low` and `name_high`."""
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def share_metrics(name: str, is_hit: np.ndarray) -> dict[str, float]:
    """Return the share of hits as `name`, and Wilson's 95 % interval as `name_low` and `name_high`."""
    return interval_metrics(name, share_interval(int(np.sum(is_hit)), len(is_hit)))


def evaluate_logits(logits: Logits, labels: Labels, *, temperature: float, calibration_bins: int) -> Evaluation:
    """Evaluate predictions of a split with a temperature that was fitted on another split."""
    predicted = np.argmax(logits, axis=1)  # of logits: rounding may make two calibrated probabilities equal

    def calibrated(divisor: float) -> tuple[Probabilities, Float[np.ndarray, " examples"], Bins, Scorer]:
        logs = log_softmax(logits.astype(np.float64) / divisor)
        probabilities, loss = np.exp(logs).astype(np.float32), -logs[np.arange(len(labels)), labels]
        reliability = fill_bins(np.max(probabilities, axis=1), predicted == labels, calibration_bins)
        return probabilities, loss, reliability, scorer(probabilities, loss, labels, calibration_bins)

    probabilities, loss, reliability, scores = calibrated(temperature)
    *_, reliability_uncalibrated, scores_uncalibrated = calibrated(1.0)
    intervals = score_intervals([scores, scores_uncalibrated], len(labels))
    return Evaluation(
        labels=labels,
        predicted=predicted,
        probabilities=probabilities,
        example_loss=loss.astype(np.float32),
        temperature=temperature,
        reliability=reliability,
        reliability_uncalibrated=reliability_uncalibrated,
        scores=intervals[0],
        scores_uncalibrated=intervals[1],
    )
