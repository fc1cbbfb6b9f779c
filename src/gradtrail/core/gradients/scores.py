"""Scores of single examples, from a pass over the data, with their ranks and summary statistics."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from gradtrail.core import per_example
from gradtrail.core.nn import losses
from gradtrail.core.nn.inference import abstract_batch
from gradtrail.core.nn.losses import Loss
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

LAYER = "grad_norm_"  # prefix of a layer's name: norm of the gradient of its parameters alone


def ranks(values: Float[np.ndarray, " examples"]) -> Float[np.ndarray, " examples"]:
    """Return ranks from 1, float64; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def correlation(left: Float[np.ndarray, " examples"], right: Float[np.ndarray, " examples"]) -> float:
    """Return Pearson's correlation, -1 to 1; 0 if one side is constant."""
    a, b = (values - np.mean(values) for values in (left, right))
    scale = np.sqrt(np.sum(a**2) * np.sum(b**2))
    return float(np.sum(a * b) / scale) if scale > 0 else 0.0


def rank_correlation(left: Float[np.ndarray, " examples"], right: Float[np.ndarray, " examples"]) -> float:
    """Return Spearman's rank correlation ρ, -1 to 1; 0 if one side is constant."""
    return correlation(ranks(left), ranks(right))


def largest(values: Float[np.ndarray, " examples"], count: int) -> Int[np.ndarray, " count"]:
    """Return the indices of the `count` largest values in descending order, ties by ascending index."""
    return np.argsort(-values, kind="stable")[:count]


def score_batch(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width *channels"],
    labels: Int[Array, " batch"],
    *,
    loss: Loss,
) -> dict[str, Array]:
    """Return the scores of each example of a batch.

    Returns:
        Arrays of shape (batch,), float32 unless stated otherwise: `grad_norm`, ‖∇ℓᵢ‖₂ over all parameters (GraNd, Paul
        et al., arXiv 2107.07075), and `grad_norm_<layer>` over those of a layer; `el2n`; `loss`, the one
        that was minimized; `probability` of the label; `margin` in logits; `entropy` of the prediction in nats;
        `input_norm`, the L2 norm of the pixels scaled to 0..1; `predicted`, the class, int32.
    """
    by_layer, logits = per_example.squared_grad_norms(model, params, images, labels, loss=loss)
    return _scores(by_layer, logits, images, labels, loss)


def score_and_sum(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width *channels"],
    labels: Int[Array, " batch"],
    mask: Bool[Array, " batch"],
    *,
    loss: Loss,
) -> tuple[dict[str, Array], Params]:
    """Return the scores of `score_batch`, and the sum of the gradients of the examples where `mask` is true.

    Both come from one backward pass; scores of the other examples are not meaningful.
    """
    by_layer, logits, grads = per_example.squared_grad_norms_and_sum(model, params, images, labels, mask, loss=loss)
    return _scores(by_layer, logits, images, labels, loss), grads


def _scores(by_layer: Mapping[str, Array], logits: Array, images: Array, labels: Array, loss: Loss) -> dict[str, Array]:
    pixels = images.reshape(images.shape[0], -1).astype(jnp.float32) / 255.0
    return {
        "grad_norm": jnp.sqrt(sum(by_layer.values(), start=jnp.float32(0))),
        **{f"{LAYER}{name}": jnp.sqrt(squares) for name, squares in by_layer.items()},
        "el2n": losses.el2n(logits, labels),
        "loss": loss.per_example(logits, labels),
        "probability": losses.label_probability(logits, labels),
        "margin": losses.margin(logits, labels),
        "entropy": losses.entropy(logits),
        "input_norm": jnp.linalg.norm(pixels, axis=1),
        "predicted": jnp.argmax(logits, axis=1).astype(jnp.int32),
    }


def compile_score(model: Model, loss: Loss, batch_size: int, *, compiler: Compiler) -> CompiledFunction:
    """Compile `score_batch` for one batch size: params, images, labels → scores."""
    function = functools.partial(score_batch, model, loss=loss)
    return compiler.compile("score", function, model.abstract_params(), *abstract_batch(model, batch_size))


def summarize(scores: Mapping[str, np.ndarray], *, top_fraction: float) -> dict[str, float]:
    """Summarize the gradient norms of a split, and their rank correlations with other scores.

    `top_fraction` is the share of the split that counts as the largest; the summary has the share of misclassified
    examples among these and among all, and the share of the largest in the sum of all norms.
    """
    norm, wrong = scores["grad_norm"].astype(np.float64), ~scores["correct"]
    top = largest(norm, max(1, round(top_fraction * len(norm))))
    compared = ("loss", "margin", "input_norm", "el2n")
    return {
        "grad_norm_median": float(np.median(norm)),
        "grad_norm_mean": float(np.mean(norm)),
        "grad_norm_max": float(np.max(norm)),
        **{f"rank_correlation_{name}": rank_correlation(norm, scores[name]) for name in compared},
        "misclassified_among_largest": float(np.mean(wrong[top])),
        "misclassified_overall": float(np.mean(wrong)),
        "norm_held_by_largest": float(np.sum(norm[top]) / max(np.sum(norm), np.finfo(np.float64).tiny)),
    }
