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

from gradtrail.core.nn.layers import ROUNDING, Layer
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.per_example.norms import Forward, forward_of, layer_metrics

_LARGEST = 2.0**16  # absolute activation or cotangent in a private training: sums of products stay finite
_UNDERFLOW = 2.0**-48  # more than a squared norm loses by squares below 2⁻¹²⁶, where no factor is above `_LARGEST`


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """A sum of clipped gradients, with the logits of its forward pass."""

    grads: Params  # like the parameters, float32
    norms: Float[Array, " examples"]  # upper bound of the L2 norm of each example's gradient before clipping, float32
    logits: Float[Array, "rows classes"]  # logits of each row


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How gradients are clipped."""

    norm: float  # L2 norm to which larger gradients are scaled down
    # rows of each example, such as augmentations of it, whose mean gradient is clipped (De et al., arXiv 2204.13650)
    copies: int
    label_smoothing: float  # label smoothing of the loss


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
    """Return Σᵢ gᵢ min(1, C / nᵢ) over the examples where `mask` is true, with nᵢ an upper bound of ‖gᵢ‖.

    gᵢ is the gradient of the mean loss of the rows of example i in `bounded_forward`. Each term is finite and no term
    has a norm above C: nᵢ includes all rounding.

    Args:
        params: parameters at which the gradients are taken.
        images: float32 in 0..1, or uint8 pixels; `copies` adjacent rows for each example.
        labels: class of each row, int32.
        mask: mask of the examples that count.
        clipping: C, the copies, and the loss.
        key: one key per row for dropout; None for no dropout.
    """
    full_precision = jax.default_matmul_precision("highest")  # for accelerators, which may round operands further

    def measure(layer: Layer, _: PyTree, inputs: Array, cotangent: Array) -> tuple[Array, PyTree]:
        with full_precision:
            return layer.clip_terms(inputs, cotangent, clipping.copies)

    forward = bounded_forward(forward_of(model, params, images, labels, clipping.label_smoothing, key))
    by_layer, logits = layer_metrics(model, forward, measure)
    squared = sum((bound for bound, _ in by_layer.values()), start=jnp.float32(_UNDERFLOW))
    norms = jnp.sqrt(squared) * (1.0 + (len(by_layer) + 16) * ROUNDING) / clipping.copies
    weights = jnp.where(mask, jnp.minimum(1.0, clipping.norm / norms) / clipping.copies, 0.0)
    with full_precision:
        parts = {name: layer.weighted_grad(by_layer[name][1], weights) for name, layer in model.layers().items()}
    return ClippedSum(grads=model.from_layers(parts), norms=norms, logits=logits)


def bounded_forward(forward: Forward) -> Forward:
    """Return a forward pass in which an example whose values overflow has finite gradients.

    Inputs, outputs and cotangents of every layer are limited to an absolute value of 2¹⁶, and NaN becomes 0: no example
    can make a sum of gradients infinite or NaN, and none has to be left out.
    """
    return lambda tap: forward(lambda name, layer, inputs: _bounded(tap(name, layer, _bounded(inputs))))


@jax.custom_vjp
def _bounded(values: Array) -> Array:
    """Limit values, and cotangents in the backward pass."""
    return jnp.clip(jnp.where(jnp.isnan(values), 0.0, values), -_LARGEST, _LARGEST)


_bounded.defvjp(lambda values: (_bounded(values), None), lambda _, cotangent: (_bounded(cotangent),))
