"""Orders and ranks; NumPy on the host."""

import numpy as np
from jaxtyping import Float, Int


def ranks(values: Float[np.ndarray, " examples"]) -> Float[np.ndarray, " examples"]:
    """Return ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def rank_correlation(left: Float[np.ndarray, " examples"], right: Float[np.ndarray, " examples"]) -> float:
    """Return Spearman's ρ, -1 to 1; 0 where one side is constant."""
    a, b = (ranks(values) - (len(values) + 1) / 2 for values in (left, right))
    scale = np.sqrt(np.sum(a**2) * np.sum(b**2))
    return float(np.sum(a * b) / scale) if scale > 0 else 0.0


def largest(values: Float[np.ndarray, " examples"], count: int) -> Int[np.ndarray, " count"]:
    """Return the indices of the `count` largest values, the largest first; equal values in order of index."""
    return np.argsort(-values, kind="stable")[:count]
