"""Exact figures of every example's gradient. `vmap(grad)` over a microbatch: the definition itself."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from gradtrail.core import losses
from gradtrail.core.compilation import CompiledFunction, compile_function
from gradtrail.core.models import Model, Params


def example_loss(
    model: Model,
    params: Params,
    image: UInt8[Array, "height width"],
    label: Int[Array, ""],
    *,
    label_smoothing: float,
) -> Float[Array, ""]:
    """Return the loss of one example, in nats, as the training minimizes its mean."""
    logits = model.apply(params, image[None])
    return losses.cross_entropy(logits, label[None], label_smoothing=label_smoothing)[0]


def per_example_grads(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width"],
    labels: Int[Array, " batch"],
    *,
    label_smoothing: float,
) -> Params:
    """Return the gradient of each example's loss: a pytree like `params`, with a leading axis of examples.

    Takes `batch` times the memory of the parameters.
    """

    def loss(params: Params, image: Array, label: Array) -> Array:
        return example_loss(model, params, image, label, label_smoothing=label_smoothing)

    return jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, images, labels)


def score_batch(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width"],
    labels: Int[Array, " batch"],
    *,
    label_smoothing: float,
) -> dict[str, Array]:
    """Return the figures of each example of a batch.

    Returns:
        float32 unless said otherwise, of shape (batch,) each: `grad_norm`, ‖∇ℓᵢ‖₂ over all parameters (GraNd, Paul et
        al., arXiv 2107.07075); `el2n`; `loss` in nats; `margin` in logits; `input_norm` of the pixels scaled to 0..1;
        `predicted`, the class, int32.
    """
    grads = per_example_grads(model, params, images, labels, label_smoothing=label_smoothing)
    logits = model.apply(params, images)
    pixels = images.reshape(images.shape[0], -1).astype(jnp.float32) / 255.0
    return {
        "grad_norm": per_example_norm(grads),
        "el2n": losses.el2n(logits, labels),
        "loss": losses.cross_entropy(logits, labels, label_smoothing=label_smoothing),
        "margin": losses.margin(logits, labels),
        "input_norm": jnp.linalg.norm(pixels, axis=1),
        "predicted": jnp.argmax(logits, axis=1).astype(jnp.int32),
    }


def compile_score(
    model: Model, label_smoothing: float, microbatch_size: int, *, clock: Callable[[], float]
) -> CompiledFunction:
    """Compile `score_batch` for one size of microbatch: params, images, labels → scores."""
    images = jax.ShapeDtypeStruct((microbatch_size, *model.config.image_shape), jnp.uint8)
    labels = jax.ShapeDtypeStruct((microbatch_size,), jnp.int32)
    function = functools.partial(score_batch, model, label_smoothing=label_smoothing)
    return compile_function("score", function, model.abstract_params(), images, labels, clock=clock)


def per_example_norm(grads: Params) -> Float[Array, " batch"]:
    """Return the L2 norm over all leaves for each entry of their leading axis, accumulated in float32."""

    def squared(leaf: Array) -> Array:
        return jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=tuple(range(1, leaf.ndim)))

    return jnp.sqrt(sum((squared(leaf) for leaf in jax.tree.leaves(grads)), start=jnp.float32(0)))
