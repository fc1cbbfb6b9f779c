"""What the per-example scores say together; NumPy on the host."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.bounds import check
from gradtrail.core.models import WeightsKind


@dataclass(frozen=True, kw_only=True)
class GradientsConfig:
    """The section `gradients` of `params.yaml`.

    Attributes:
        weights: of the last epoch, or of the one with the best validation accuracy.
        microbatch_size: examples whose gradients are held at a time.
        top_fraction: share of a split that counts as "the largest gradients".
        num_largest: in the gallery.
    """

    weights: WeightsKind
    microbatch_size: int
    top_fraction: float
    num_largest: int

    def __post_init__(self) -> None:
        check("microbatch_size", self.microbatch_size, at_least=1)
        check("top_fraction", self.top_fraction, above=0, at_most=1)
        check("num_largest", self.num_largest, at_least=1, at_most=400)


def summarize(scores: Mapping[str, np.ndarray], *, top_fraction: float) -> dict[str, float]:
    """Answer in numbers which examples of a split have the largest gradients, and why.

    Args:
        scores: `grad_norm`, `el2n`, `loss`, `margin`, `input_norm` and `correct` of each example.
        top_fraction: share of the split that counts as the largest.

    Returns:
        Median, mean and maximum of the norm; Spearman's rank correlation of the norm with each other score; the share
        of misclassified examples among the largest and among all; the share of all gradient norm that the largest hold.
    """
    norm, wrong = scores["grad_norm"].astype(np.float64), ~scores["correct"]
    top = largest(norm, max(1, round(top_fraction * len(norm))))
    others = ("loss", "margin", "input_norm", "el2n")
    return {
        "grad_norm_median": float(np.median(norm)),
        "grad_norm_mean": float(np.mean(norm)),
        "grad_norm_max": float(np.max(norm)),
        **{f"rank_correlation_{name}": rank_correlation(norm, scores[name]) for name in others},
        "misclassified_among_largest": float(np.mean(wrong[top])),
        "misclassified_overall": float(np.mean(wrong)),
        "norm_held_by_largest": float(np.sum(norm[top]) / max(np.sum(norm), np.finfo(np.float64).tiny)),
    }


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
