"""Wrong labels on purpose, for the study of mislabelled data; NumPy on the host."""

import numpy as np
from jaxtyping import Int


def symmetric_noise(
    labels: Int[np.ndarray, " examples"], rate: float, num_classes: int, *, seed: int | tuple[int, ...]
) -> Int[np.ndarray, " examples"]:
    """Give a random share of the examples another label, each other class being equally likely.

    Args:
        labels: the true class of each example.
        rate: share that becomes wrong, in [0, 1); exactly round(rate · n) labels differ.
        num_classes: at least 2.
        seed: determines which examples, and their labels.
    """
    rng = np.random.default_rng(seed)
    flipped = rng.permutation(len(labels))[: round(rate * len(labels))]
    shift = rng.integers(1, num_classes, size=len(flipped))
    noisy = labels.copy()
    noisy[flipped] = (labels[flipped] + shift) % num_classes
    return noisy
