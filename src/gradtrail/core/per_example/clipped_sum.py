"""The sum of clipped per-example gradients, from one backward pass.

The backward pass hands each layer its inputs and the cotangents of its outputs. From these follow the norm of each
example's gradient, so its clip factor, and then the sum of the gradients times their factors: as the product of the
inputs with the scaled cotangents, or of gradients that were formed for the norm. Ghost clipping (Li et al., arXiv
2110.05679) makes a second backward pass of the reweighted loss for that; keeping the cotangents is the book-keeping of
Bu et al. (arXiv 2210.00038).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt8

from gradtrail.core.nn.layers import Layer
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.nn.precision import Precision
from gradtrail.core.per_example.norms import forward_of, layer_metrics

# Largest relative error of rounding to a precision, and some for sums
_EPSILON: dict[Precision, float] = {"float32": 2.0**-21, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """A sum of clipped gradients, and what its forward pass found.

    Attributes:
        grads: like the parameters, float32.
        norms: L2 norm of each example's gradient before clipping, float32.
        logits: of each row.
    """

    grads: Params
    norms: Float[Array, " examples"]
    logits: Float[Array, "rows classes"]


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How gradients are clipped.

    Attributes:
        norm: L2 norm to which larger gradients are scaled down.
        copies: rows of each example, such as augmentations of it, whose mean gradient is clipped (De et al., arXiv
            2204.13650).
        label_smoothing: of the loss.
    """

    norm: float
    copies: int
    label_smoothing: float


def clipped_grad_sum(
    model: Model,
    params: Params,
    images: UInt8[Array, "rows height width"] | Float[Array, "rows height width"],
    labels: Int[Array, " rows"],
    mask: Bool[Array, " examples"],
    clipping: Clipping,
    *,
    key: Key[Array, " rows"] | None = None,
) -> ClippedSum:
    """Return Σᵢ gᵢ min(1, C / ‖gᵢ‖) over the examples where `mask` is true.

    gᵢ is the gradient of the mean loss of the rows of example i. No term has a norm above C: what rounding may add, in
    the precision of the network's products, is taken off before.

    Args:
        model: the network.
        params: where the gradients are taken.
        images: float32 in 0..1, or uint8 pixels; `copies` adjacent rows for each example.
        labels: class of each row, int32.
        mask: of the examples.
        clipping: C, the copies, and the loss.
        key: for dropout, one for each row; None for no dropout.
    """

    def measure(layer: Layer, _: PyTree, inputs: Array, cotangent: Array) -> tuple[Array, PyTree]:
        return layer.clip_terms(inputs, cotangent, clipping.copies)

    forward = forward_of(model, params, images, labels, clipping.label_smoothing, key)
    by_layer, logits = layer_metrics(model, forward, measure)
    squared = sum((norms for norms, _ in by_layer.values()), start=jnp.float32(0))
    norms = jnp.sqrt(jnp.maximum(squared, 0.0)) / clipping.copies  # pairs of pixels may cancel to less than 0
    most = clipping.norm * (1.0 - _EPSILON[model.config.precision])
    factors = jnp.where(norms > most, most / norms, 1.0)
    weights = jnp.where(mask, factors / clipping.copies, 0.0)
    parts = {name: layer.weighted_grad(by_layer[name][1], weights) for name, layer in model.layers().items()}
    return ClippedSum(grads=model.from_layers(parts), norms=norms, logits=logits)
