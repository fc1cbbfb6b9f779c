"""Exact figures of every example's gradient, without the gradients.

One backward pass to the outputs of the layers; each layer knows the norm of its own gradient from what went in and what
came back. `per_example_grads`, the definition, is what that is tested against.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, PyTree, UInt8

from gradtrail.core import losses
from gradtrail.core.compilation import CompiledFunction, compile_function
from gradtrail.core.layers import Layer
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


def squared_grad_norms(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width"],
    labels: Int[Array, " batch"],
    *,
    label_smoothing: float,
    key: Key[Array, " batch"] | None = None,
) -> tuple[dict[str, Float[Array, " batch"]], Float[Array, "batch classes"]]:
    """Return the squared L2 norm of each example's gradient layer by layer, and the logits.

    Args:
        model: its layers are probed one by one; where one has no better way, by the gradients themselves.
        params: where the gradients are taken.
        images: of the examples.
        labels: of the examples.
        label_smoothing: of the loss.
        key: for dropout, one for each example.

    Returns:
        Name of a layer → squared norms, float32; the logits.
    """

    def total_loss(probes: dict[str, Array]) -> tuple[Array, Array]:
        logits = model.apply(
            params, images, key=key, tap=lambda name, layer, inputs: _probed(layer, inputs, probes[name])
        )
        return jnp.sum(losses.cross_entropy(logits, labels, label_smoothing=label_smoothing)), logits

    probes = {name: jnp.zeros(len(images)) for name in model.layers()}
    return jax.grad(total_loss, has_aux=True)(probes)


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
    by_layer, logits = squared_grad_norms(model, params, images, labels, label_smoothing=label_smoothing)
    pixels = images.reshape(images.shape[0], -1).astype(jnp.float32) / 255.0
    return {
        "grad_norm": jnp.sqrt(sum(by_layer.values(), start=jnp.float32(0))),
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


def _probed(layer: Layer, inputs: Float[Array, "..."], probe: Float[Array, " batch"]) -> Float[Array, "..."]:
    """Send inputs through a layer; what comes back for `probe`, which itself does nothing, is the squared norm."""
    graphdef, state = nnx.split(layer)
    return _probe(graphdef, state, inputs, probe)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _probe(graphdef: Any, state: PyTree, inputs: Array, _: Array) -> Array:
    return nnx.merge(graphdef, state)(inputs)


def _probe_forward(graphdef: Any, state: PyTree, inputs: Array, _: Array) -> tuple[Array, tuple[PyTree, Array]]:
    return nnx.merge(graphdef, state)(inputs), (state, inputs)


def _probe_backward(graphdef: Any, residuals: tuple[PyTree, Array], cotangent: Array) -> tuple[PyTree, Array, Array]:
    """Go on to the inputs, and leave the parameters' own gradient out: nobody asks for it."""
    state, inputs = residuals
    layer = nnx.merge(graphdef, state)
    _, pull_back = jax.vjp(layer, inputs)
    none = jax.tree.map(jnp.zeros_like, state)
    return none, pull_back(cotangent)[0], layer.squared_grad_norms(inputs, cotangent)


_probe.defvjp(_probe_forward, _probe_backward)
