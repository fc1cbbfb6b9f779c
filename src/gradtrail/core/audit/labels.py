"""Suspicion scores of labels, number of wrong labels, and probability of each to be wrong; NumPy on the host.

All of it follows from logits of networks that were not trained on the example, see `networks`.

**How many**: the confident joint of Northcutt, Jiang and Chuang (arXiv 1911.00068, equation 1) counts a label as wrong
if another class is at least as probable as that class is on the average example that is labelled with it.

**Which**: the networks also score wrong labels that are drawn for comparison. By Bayes' rule a label with score s is
wrong with probability π h(s) / f(s), where h is the density of the scores of wrong labels and f that of the given ones.
Their ratio comes from the training split, by isotonic regression; π is scaled so that the probabilities of a split add
up to its expected number of wrong labels.

The wrong labels that are drawn are spread evenly over the examples; people's errors are mostly on hard ones, where a
wrong label is less conspicuous. Both estimates are then too low for the ambiguous examples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core import evaluate
from gradtrail.core.intervals import Interval, bisect, share_interval

Logits = Float[np.ndarray, "networks examples classes"]
Labels = Int[np.ndarray, " examples"]
Scores = Float[np.ndarray, " examples"]
Seed: TypeAlias = int | np.random.SeedSequence

# Scores to choose from on planted noise; `grad_norm` is compared too, but exists for the given labels only
CANDIDATES = ("margin", "self_confidence", "el2n", "odds", "log_margin", "disagreement")
_SMALLEST = 1e-9  # probability below which logits are meaningless
_FITTED = 10_000  # most examples to fit a temperature on
# Bins of the share of drawn labels with a lower score: fine where correct labels begin, 2 % each above
_EDGES = np.concatenate([[0.0], np.geomspace(1e-4, 0.02, 12), np.linspace(0.04, 1.0, 49)])


class Stream(IntEnum):
    """First number of a spawn key of `audit.seed`; the comment lists the further ones."""

    FOLDS = 0  # round
    TRAINING = 1  # label set, round, fold
    PLANTED_LABELS = 2  # label set
    PLANTED_PLACES = 3  # label set
    COMPARED_LABELS = 4  # label set, split, kind of noise


def stream(seed: int, purpose: Stream, *numbers: int) -> np.random.SeedSequence:
    """Return the seed of one of the independent streams of random numbers of an audit."""
    return np.random.SeedSequence(seed, spawn_key=(purpose, *numbers))


@dataclass(frozen=True, kw_only=True)
class OutOfFold:
    """Labels of the examples of a split, and the logits of networks that were not trained on the example."""

    labels: Labels  # given or planted labels, int32
    logits: Logits  # float32
    grad_norm: Scores  # gradient norm with the label, the mean over the first round's networks, float32


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings on the labels of one split; a row for each example."""

    scores: Mapping[str, Scores]  # scores by name; a larger one is more suspicious
    proposed: Labels  # the most probable class, int32
    proposed_probability: Scores  # mean probability of that class at the fitted temperature
    probability_wrong: Scores  # probability that the label is wrong
    rate: Interval  # share of wrong labels in the split


def find_errors(splits: Mapping[str, OutOfFold], chosen: str, *, seed: int, label_set: int = 0) -> dict[str, Findings]:
    """Return the findings on the labels of each split; `train` is the first.

    The temperature, and the ratio of densities behind `probability_wrong`, are those of the training split; of another
    split only the share of wrong labels is estimated.

    Args:
        chosen: name of the score that `probability_wrong` follows from.
        label_set: number of the set of labels, 0 for the given ones; each set has its own random numbers.
    """
    temperature = fit_temperature(splits["train"])
    findings: dict[str, Findings] = {}
    ratio: np.ndarray | None = None
    for place, (name, split) in enumerate(splits.items()):
        scores = label_scores(split.logits, split.labels, temperature)
        mean = mean_probabilities(split.logits, temperature)

        # two wrong labels for each example whose label is the prediction, one of each kind of noise
        agreed = np.flatnonzero(np.argmax(mean, axis=1) == split.labels)
        seeds = [stream(seed, Stream.COMPARED_LABELS, label_set, place, kind) for kind in range(2)]
        drawn = (
            draw_uniform(split.labels[agreed], mean.shape[1], seed=seeds[0]),
            draw_confused(mean[agreed], split.labels[agreed], seed=seeds[1]),
        )
        wrong = [label_scores(split.logits[:, agreed], labels, temperature)[chosen] for labels in drawn]

        places = positions(scores[chosen], np.concatenate(wrong))
        ratio = density_ratio(places) if ratio is None else ratio
        rate = confident_rate(mean, split.labels)
        findings[name] = Findings(
            scores={**scores, "grad_norm": split.grad_norm},
            proposed=np.argmax(mean, axis=1).astype(np.int32),
            proposed_probability=mean.max(axis=1),
            probability_wrong=probability_wrong(places, ratio, rate.value),
            rate=rate,
        )
    return findings


def mean_probabilities(logits: Logits, temperature: float) -> Float[np.ndarray, "examples classes"]:
    """Return the mean of the networks' probabilities, float64."""
    return _probabilities(logits, temperature).mean(axis=0)


def _probabilities(logits: Logits, temperature: float) -> Float[np.ndarray, "networks examples classes"]:
    return np.exp(evaluate.log_softmax((logits / temperature).astype(np.float64)))


def fit_temperature(split: OutOfFold) -> float:
    """Return the temperature of the networks, fitted on at most 10,000 examples that they were not trained on."""
    every = -(-len(split.labels) // _FITTED)
    return evaluate.fit_temperature(split.logits[:, ::every], split.labels[::every])


def label_scores(logits: Logits, labels: Labels, temperature: float) -> dict[str, Scores]:
    """Return the scores of labels by networks that were not trained on the examples, float64.

    Returns:
        `margin`, the largest mean probability of another class minus that of the label, -1 to 1 (Northcutt et al.,
        arXiv 1911.00068); `self_confidence`, one minus the label's mean probability; `el2n`, the mean over the networks
        of ‖p - onehot(label)‖₂ (Paul et al., arXiv 2107.07075); `log_margin`, the mean over the networks of the largest
        other logit minus that of the label (after Pleiss et al., arXiv 2001.10528, who take it over epochs);
        `disagreement`, the share of networks that predict another class; `odds`, the log of the odds that the label is
        wrong if half of the errors are uniform and half are the networks' own confusions, up to the error rate: of
        ½ (1 - p_y) / ((k - 1) p_y) + ½ Σ_{j ≠ y} p_j / (1 - p_j) with the mean probabilities p of k classes.
    """
    rows = np.arange(len(labels))
    is_label = np.arange(logits.shape[-1]) == labels[:, None]
    by_network = _probabilities(logits, temperature)
    mean = by_network.mean(axis=0)
    other_logits = np.where(is_label, -np.inf, logits).max(axis=-1)
    certain = np.clip(mean, _SMALLEST, 1 - _SMALLEST)
    label_probability, other_probabilities = certain[rows, labels], np.where(is_label, 0, certain)
    confused = (other_probabilities / (1 - other_probabilities)).sum(axis=-1)
    margins = (other_logits.astype(np.float64) - logits[:, rows, labels]) / temperature
    return {
        "margin": np.where(is_label, -np.inf, mean).max(axis=-1) - mean[rows, labels],
        "self_confidence": np.where(is_label, 0, mean).sum(axis=-1),
        "el2n": np.sqrt(((by_network - is_label) ** 2).sum(axis=-1)).mean(axis=0),
        "odds": np.log(((1 - label_probability) / label_probability / (mean.shape[-1] - 1) + confused) / 2),
        "log_margin": margins.mean(axis=0),
        "disagreement": (margins > 0).mean(axis=0),
    }


def draw_uniform(labels: Labels, num_classes: int, *, seed: Seed) -> Labels:
    """Draw a wrong label for each example, each other class being equally likely; int32."""
    steps = np.random.default_rng(seed).integers(1, num_classes, size=len(labels))
    return ((labels + steps) % num_classes).astype(np.int32)


def draw_confused(probabilities: Float[np.ndarray, "examples classes"], labels: Labels, *, seed: Seed) -> Labels:
    """Draw a wrong label for each example as networks confuse it: class j with probability p_j / (1 - p_label)."""
    weights = np.maximum(probabilities.astype(np.float64), 1e-12)
    weights[np.arange(len(labels)), labels] = 0
    total = np.cumsum(weights, axis=1)
    drawn = np.random.default_rng(seed).random(len(labels)) * total[:, -1]
    return np.argmax(total > drawn[:, None], axis=1).astype(np.int32)


def plant(labels: Labels, wrong: Labels, rate: float, *, seed: Seed) -> Labels:
    """Return the labels with those of round(rate · n) random examples replaced by `wrong`."""
    rows = np.random.default_rng(seed).permutation(len(labels))[: round(rate * len(labels))]
    planted = labels.copy()
    planted[rows] = wrong[rows]
    return planted


def confident_rate(probabilities: Float[np.ndarray, "examples classes"], labels: Labels) -> Interval:
    """Return the share of wrong labels by the confident joint: the score interval of their count, and its centre."""
    rows = np.arange(len(labels))
    sums = np.bincount(labels, weights=probabilities[rows, labels], minlength=probabilities.shape[1])
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    is_confident = confident.max(axis=1) >= 0
    num_wrong = int(np.sum(is_confident & (confident.argmax(axis=1) != labels)))
    interval = share_interval(num_wrong, max(int(is_confident.sum()), 1))
    centre = (interval.low + interval.high) / 2
    return Interval(value=centre, low=interval.low if num_wrong else 0.0, high=interval.high)


def positions(scores: Scores, wrong: Float[np.ndarray, " wrong"]) -> Scores:
    """Return the share of the wrong labels with a lower score, 0 to 1; equal scores count half."""
    ordered = np.sort(wrong)
    below, up_to = (np.searchsorted(ordered, scores, side=side) for side in ("left", "right"))
    return (below + up_to) / (2 * len(ordered))


def density_ratio(positions: Scores) -> Float[np.ndarray, " bins"]:
    """Return h / f in bins of positions, not decreasing; half an example more in the last bin keeps it finite."""
    counts = np.bincount(_bins(positions), minlength=len(_EDGES) - 1).astype(np.float64)
    counts[-1] += 0.5
    return 1 / _decreasing(counts / len(positions) / np.diff(_EDGES), np.diff(_EDGES))


def probability_wrong(positions: Scores, ratio: Float[np.ndarray, " bins"], share: float) -> Scores:
    """Return the probability that each label is wrong, float64.

    Their mean is the share of wrong labels, unless their bound (n + 1) / (n + 2) for `n` wrong labels prevents it.
    """
    number = share * len(positions)
    largest = (number + 1) / (number + 2)
    bins = _bins(positions)
    counts = np.bincount(bins, minlength=len(ratio))
    scale = bisect(
        lambda scale: bool(np.sum(counts * np.minimum(scale * ratio, largest)) < number), 0.0, 1e12, halvings=100
    )
    return np.minimum(scale * ratio, largest)[bins]


def _bins(positions: Scores) -> Int[np.ndarray, " examples"]:
    return np.clip(np.searchsorted(_EDGES, positions, side="right") - 1, 0, len(_EDGES) - 2)


def _decreasing(values: Float[np.ndarray, " bins"], weights: Float[np.ndarray, " bins"]) -> Float[np.ndarray, " bins"]:
    """Return the weighted least-squares fit that does not increase, by pooling adjacent violators."""
    blocks: list[tuple[float, float, int]] = []  # sum, weight, bins
    for value, weight in zip(values, weights, strict=True):
        block = (value * weight, weight, 1)
        while blocks and blocks[-1][0] * block[1] <= block[0] * blocks[-1][1]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    return np.concatenate([np.full(count, total / weight) for total, weight, count in blocks])
