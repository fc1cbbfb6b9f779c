"""Which examples train and which are held out; NumPy on the host."""

from typing import TypeAlias

import numpy as np
from jaxtyping import Int, Integer

Seed: TypeAlias = int | tuple[int, ...]


def stratified_split(
    labels: Integer[np.ndarray, " examples"], fraction: float, *, seed: Seed
) -> tuple[Int[np.ndarray, " kept"], Int[np.ndarray, " held_out"]]:
    """Split examples so that every class keeps its share in both parts.

    Args:
        labels: class of each example, 0 or more.
        fraction: share that is held out, in [0, 1).
        seed: determines which.

    Returns:
        Indices that are kept and indices that are held out, each ascending. Of `n` examples round(fraction · n) are
        held out; of each class a share that differs from `fraction` by less than one example.
    """
    rng = np.random.default_rng(seed)
    counts = np.bincount(labels)
    quotas = _largest_remainders(counts * fraction, round(fraction * len(labels)))
    held_out = [rng.permutation(np.flatnonzero(labels == label))[:quota] for label, quota in enumerate(quotas)]
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def stratified_subset(labels: Integer[np.ndarray, " examples"], size: int, *, seed: Seed) -> Int[np.ndarray, " size"]:
    """Return ascending indices of `size` examples in which every class keeps its share; all where there are fewer."""
    if size >= len(labels):
        return np.arange(len(labels))
    return stratified_split(labels, size / len(labels), seed=seed)[1]


def _largest_remainders(shares: np.ndarray, total: int) -> np.ndarray:
    """Round shares to whole numbers that add up to `total`: down, then up where most was cut off."""
    quotas = np.floor(shares).astype(np.int64)
    neediest = np.argsort(quotas - shares, kind="stable")
    quotas[neediest[: total - quotas.sum()]] += 1
    return quotas
