"""Scores of canaries: how much more a training's gradients look as if a canary had been in its batches; NumPy."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

_MOST = 60.0  # largest exponent


@dataclass(frozen=True, kw_only=True)
class Products:
    """Inner products of each step with each canary, layer by layer, in units of the clip norm C.

    A canary's direction d in a layer is its clipped gradient, made of the layer's inputs less their mean over the
    canaries of its tile, and without the bias: what all images share is large and irrelevant.
    """

    # inner products ⟨d, Σ + σ C z⟩ / C² of the direction with the sum for the optimizer, float32
    products: Float[np.ndarray, "steps layers canaries"]
    # squares ‖d‖² / C², about what a canary in the batch adds to the product, float32
    signals: Float[np.ndarray, "steps layers canaries"]


def batch_scores(
    observed: Products, labels: Int[np.ndarray, " canaries"], rate: float
) -> Float[np.ndarray, " canaries"]:
    """Return the log-likelihood ratio of each canary being in each batch with probability `rate` or never.

    Σ over steps of ln(1 - q + q exp(Σ over layers of (x a - a²/2) / s²)): a product x is a more, its signal, where the
    canary is in the batch, and is taken as normal with the standard deviation s that the layer's products have in this
    step. What canaries of a label share carries no information about a coin, and is subtracted.
    """
    ratios = _log_ratios(observed, labels)
    return np.sum(np.log1p(rate * np.expm1(ratios)), axis=0)


def fixed_order_scores(
    observed: Products, labels: Int[np.ndarray, " canaries"], steps_per_epoch: int
) -> Float[np.ndarray, " canaries"]:
    """Return the ratio for batches that are the same in every epoch: of being in one of them, or in none."""
    by_epoch = _log_ratios(observed, labels).reshape(-1, steps_per_epoch, len(labels))
    by_place = np.sum(by_epoch, axis=0)
    most = by_place.max(axis=0)
    return most + np.log(np.mean(np.exp(by_place - most), axis=0))


def guess(scores: Float[np.ndarray, " canaries"], coins: Bool[np.ndarray, " canaries"], count: int) -> tuple[int, int]:
    """Guess the coins of the `count` canaries with the most extreme scores; return guesses and correct ones.

    Half of them, those with the largest scores, are taken to have been in the training set; the other half, with the
    smallest, not.
    """
    order = np.argsort(-scores, kind="stable")
    inside, outside = order[: (count + 1) // 2], order[len(order) - count // 2 :]
    return count, int(coins[inside].sum() + (~coins[outside]).sum())


def _log_ratios(observed: Products, labels: Int[np.ndarray, " canaries"]) -> Float[np.ndarray, "steps canaries"]:
    """Return the log-likelihood ratio of each canary being in each batch or not."""
    centred = observed.products.astype(np.float64)
    for label in np.unique(labels):
        has_label = labels == label
        centred[..., has_label] -= np.median(centred[..., has_label], axis=-1, keepdims=True)
    deviation = 1.4826 * np.median(np.abs(centred), axis=-1, keepdims=True)  # most canaries are in few batches
    signals = observed.signals.astype(np.float64)
    ratios = np.sum((centred * signals - signals**2 / 2) / np.maximum(deviation, 1e-6) ** 2, axis=1)
    return np.clip(ratios, -_MOST, _MOST)
