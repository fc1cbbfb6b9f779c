"""Draws and plants wrong labels, to measure how well they are found; NumPy on the host."""

from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int

Seed: TypeAlias = int | np.random.SeedSequence


def draw_confused(
    probabilities: Float[np.ndarray, "examples classes"], labels: Int[np.ndarray, " examples"], *, seed: Seed
) -> Int[np.ndarray, " examples"]:
    """Draw a wrong label for each example as a network would confuse it.

    Args:
        probabilities: class probabilities by networks that did not train on the example.
        labels: the classes that are not drawn, int32.

    Returns:
        int32; class `j` with probability p_j / (1 - p_label).
    """
    weights = np.maximum(probabilities.astype(np.float64), 1e-12)
    weights[np.arange(len(labels)), labels] = 0
    total = np.cumsum(weights, axis=1)
    drawn = np.random.default_rng(seed).random(len(labels)) * total[:, -1]
    return np.argmax(total > drawn[:, None], axis=1).astype(np.int32)


def draw_uniform(labels: Int[np.ndarray, " examples"], num_classes: int, *, seed: Seed) -> Int[np.ndarray, " examples"]:
    """Draw a wrong label for each example, each other class being equally likely; int32."""
    shift = np.random.default_rng(seed).integers(1, num_classes, size=len(labels))
    return ((labels + shift) % num_classes).astype(np.int32)


def plant(
    labels: Int[np.ndarray, " examples"], wrong: Int[np.ndarray, " examples"], rate: float, *, seed: Seed
) -> Int[np.ndarray, " examples"]:
    """Return the labels with those of round(rate · n) random examples replaced by `wrong`."""
    chosen = np.random.default_rng(seed).permutation(len(labels))[: round(rate * len(labels))]
    planted = labels.copy()
    planted[chosen] = wrong[chosen]
    return planted
