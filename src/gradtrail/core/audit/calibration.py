"""Number of wrong labels of a split, and the probability of each label to be wrong; NumPy on the host.

**How many**: the confident joint of Northcutt, Jiang and Chuang (arXiv 1911.00068, equation 1) counts a label as wrong
if another class is at least as probable as that class is on the average example that is labelled with it.

**Which**: the same networks, none of which was trained on the example, also score wrong labels that are drawn for
comparison. By Bayes' rule a label with score s is wrong with probability π h(s) / f(s), where h is the density of the
scores of wrong labels and f that of the given ones. Their ratio comes from the training split, by isotonic regression;
π is scaled so that the probabilities of a split add up to its expected number of wrong labels.

The wrong labels that are drawn are spread evenly over the examples; people's errors are mostly on hard ones, where a
wrong label is less conspicuous. Both estimates are then too low for the ambiguous examples.
"""

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.intervals import Interval, share_interval

# Bins of the share of planted labels with a lower score: fine where correct labels begin, 2 % each above
_EDGES = np.concatenate([[0.0], np.geomspace(1e-4, 0.02, 12), np.linspace(0.04, 1.0, 49)])
_HALVINGS = 100  # bisections for the scale of the probabilities
_LARGEST_SCALE = 1e12


def confident_rate(
    probabilities: Float[np.ndarray, "examples classes"], labels: Int[np.ndarray, " examples"]
) -> Interval:
    """Return the share of wrong labels by the confident joint: the score interval of their count, and its centre.

    Args:
        probabilities: class probabilities by networks that did not train on the example.
        labels: given class of each example.
    """
    rows = np.arange(len(labels))
    sums = np.bincount(labels, weights=probabilities[rows, labels], minlength=probabilities.shape[1])
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    is_confident = confident.max(axis=1) >= 0
    num_wrong = int(np.sum(is_confident & (confident.argmax(axis=1) != labels)))
    total = max(int(is_confident.sum()), 1)
    interval = share_interval(num_wrong, total)
    return Interval(
        value=(interval.low + interval.high) / 2, low=interval.low if num_wrong else 0.0, high=interval.high
    )


def positions(
    scores: Float[np.ndarray, " examples"], wrong: Float[np.ndarray, " wrong"]
) -> Float[np.ndarray, " examples"]:
    """Return the share of the wrong labels with a lower score, 0 to 1; equal scores count half."""
    ordered = np.sort(wrong)
    below, up_to = (np.searchsorted(ordered, scores, side=side) for side in ("left", "right"))
    return (below + up_to) / (2 * len(ordered))


def density_ratio(positions: Float[np.ndarray, " examples"]) -> Float[np.ndarray, " bins"]:
    """Return h / f in bins of positions, not decreasing; see `probability_wrong`.

    Half an example is added to the last bin to keep the ratio finite.
    """
    counts = np.bincount(_bins(positions), minlength=len(_EDGES) - 1).astype(np.float64)
    counts[-1] += 0.5
    return 1 / _decreasing(counts / len(positions) / np.diff(_EDGES), np.diff(_EDGES))


def probability_wrong(
    positions: Float[np.ndarray, " examples"], ratio: Float[np.ndarray, " bins"], share: float
) -> Float[np.ndarray, " examples"]:
    """Return the probability that each label is wrong, float64.

    Args:
        positions: positions of the given labels' scores among those of wrong labels.
        ratio: ratio of the densities of this or of a larger split, see `density_ratio`.
        share: share of wrong labels, which is the mean of the probabilities unless their bound (n + 1) / (n + 2) for
            `n` wrong labels prevents it.
    """
    number = share * len(positions)
    largest = (number + 1) / (number + 2)
    counts = np.bincount(_bins(positions), minlength=len(ratio))
    low, high = 0.0, _LARGEST_SCALE
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        expected = np.sum(counts * np.minimum(middle * ratio, largest))
        low, high = (middle, high) if expected < number else (low, middle)
    return np.minimum(low * ratio, largest)[_bins(positions)]


def _bins(positions: Float[np.ndarray, " examples"]) -> Int[np.ndarray, " examples"]:
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
