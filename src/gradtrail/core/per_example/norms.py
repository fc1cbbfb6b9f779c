"""Exact figures of every example's gradient, without the gradients.

One backward pass to the outputs of the layers; from what went in and what came back, each layer tells norms and inner
products of its own gradients. `per_example_grads`, the definition, is what all of it is tested against.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt8

from gradtrail.core.common import batching
from gradtrail.core.nn import losses
from gradtrail.core.nn.layers import Layer
from gradtrail.core.nn.models import Model, Params

Measure: TypeAlias = Callable[[Layer, PyTree, Array, Array], PyTree]
Signals: TypeAlias = dict[str, tuple[Array, Array]]


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


def layer_figures(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width"],
    labels: Int[Array, " batch"],
    measure: Measure,
    *,
    label_smoothing: float,
    given: Mapping[str, PyTree] | None = None,
    key: Key[Array, " batch"] | None = None,
) -> tuple[dict[str, PyTree], Float[Array, "batch classes"]]:
    """Hand what goes into each layer, and the cotangent of what comes out, to `measure`; no gradient is formed for it.

    Args:
        model: its layers are visited one by one.
        params: where the gradients are taken.
        images: of the examples.
        labels: of the examples.
        measure: layer, what is given for it, inputs, cotangent → a pytree of float32 arrays.
        label_smoothing: of the loss.
        given: name of a layer → whatever `measure` needs for it; a pytree of arrays.
        key: for dropout, one for each example.

    Returns:
        Name of a layer → what `measure` made of it; the logits.
    """
    given = given or dict.fromkeys(model.layers(), ())
    probes: dict[str, PyTree] = {}

    def abstract_tap(name: str, layer: Layer, inputs: Array) -> Array:
        outputs: Array = layer(inputs)  # the cotangent is like them
        probes[name] = jax.eval_shape(functools.partial(measure, layer), given[name], inputs, outputs)
        return outputs

    def tap(name: str, layer: Layer, inputs: Array) -> Array:
        graphdef, state = nnx.split(layer)
        return _probe(graphdef, measure, state, given[name], inputs, probes[name])

    def total_loss(found: dict[str, PyTree]) -> tuple[Array, Array]:
        probes.update(found)
        logits = model.apply(params, images, key=key, tap=tap)
        return jnp.sum(losses.cross_entropy(logits, labels, label_smoothing=label_smoothing)), logits

    jax.eval_shape(lambda: model.apply(params, images, key=key, tap=abstract_tap))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), probes)
    return jax.grad(total_loss, has_aux=True)(zeros)


def squared_grad_norms(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width"],
    labels: Int[Array, " batch"],
    *,
    label_smoothing: float,
    key: Key[Array, " batch"] | None = None,
) -> tuple[dict[str, Float[Array, " batch"]], Float[Array, "batch classes"]]:
    """Return the squared L2 norm of each example's gradient layer by layer, float32, and the logits."""

    def measure(layer: Layer, _: PyTree, inputs: Array, cotangent: Array) -> Array:
        return layer.squared_grad_norms(inputs, cotangent)

    return layer_figures(model, params, images, labels, measure, label_smoothing=label_smoothing, key=key)


def grad_dots(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width"],
    labels: Int[Array, " batch"],
    directions: Params,
    *,
    label_smoothing: float,
    key: Key[Array, " batch"] | None = None,
) -> Float[Array, "batch directions"]:
    """Return the inner product of each example's gradient with some directions, such as the mean gradient, float32.

    `directions` is a pytree like `params`, with a leading axis of directions.
    """

    def measure(layer: Layer, directions: PyTree, inputs: Array, cotangent: Array) -> Array:
        return layer.grad_dots(inputs, cotangent, directions)

    by_layer, _ = layer_figures(
        model,
        params,
        images,
        labels,
        measure,
        given=model.by_layer(directions),
        label_smoothing=label_smoothing,
        key=key,
    )
    return sum(by_layer.values(), start=jnp.float32(0))


def signals(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width"],
    labels: Int[Array, " batch"],
    *,
    label_smoothing: float,
) -> Signals:
    """Return what each layer's gradients are made of: its inputs and the cotangents of its outputs, by its name."""

    def measure(_: Layer, __: PyTree, inputs: Array, cotangent: Array) -> tuple[Array, Array]:
        return inputs, cotangent

    return layer_figures(model, params, images, labels, measure, label_smoothing=label_smoothing)[0]


def grad_products(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width"],
    labels: Int[Array, " batch"],
    others: Signals,
    *,
    label_smoothing: float,
) -> Float[Array, "batch others"]:
    """Return the inner product of each example's gradient with those of other examples, given by their `signals`."""

    def measure(layer: Layer, other: tuple[Array, Array], inputs: Array, cotangent: Array) -> Array:
        return layer.grad_products(inputs, cotangent, *other)

    by_layer, _ = layer_figures(model, params, images, labels, measure, given=others, label_smoothing=label_smoothing)
    return sum(by_layer.values(), start=jnp.float32(0))


def summed_grad(
    model: Model,
    params: Params,
    images: UInt8[Array, "batch height width"],
    labels: Int[Array, " batch"],
    mask: Bool[Array, " batch"],
    *,
    label_smoothing: float,
) -> Params:
    """Return the sum of the gradients of the examples that `mask` leaves."""

    def loss(params: Params) -> Array:
        each = losses.cross_entropy(model.apply(params, images), labels, label_smoothing=label_smoothing)
        return batching.masked_sum(each, mask)

    return jax.grad(loss)(params)


def unknown_layers(model: Model) -> list[str]:
    """Return the names of the layers that know no way to their gradients but the definition, which is slow."""
    return [name for name, layer in model.layers().items() if not layer.is_known]


def per_example_norm(grads: Params) -> Float[Array, " batch"]:
    """Return the L2 norm over all leaves for each entry of their leading axis, accumulated in float32."""

    def squared(leaf: Array) -> Array:
        return jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=tuple(range(1, leaf.ndim)))

    return jnp.sqrt(sum((squared(leaf) for leaf in jax.tree.leaves(grads)), start=jnp.float32(0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _probe(graphdef: Any, measure: Measure, state: PyTree, given: PyTree, inputs: Array, probe: PyTree) -> Array:
    """Send inputs through a layer; what comes back for `probe`, which itself does nothing, is what `measure` finds."""
    return _probe_forward(graphdef, measure, state, given, inputs, probe)[0]


def _probe_forward(
    graphdef: Any, _: Measure, state: PyTree, given: PyTree, inputs: Array, __: PyTree
) -> tuple[Array, tuple[PyTree, PyTree, Array]]:
    return nnx.merge(graphdef, state)(inputs), (state, given, inputs)


def _probe_backward(
    graphdef: Any, measure: Measure, residuals: tuple[PyTree, PyTree, Array], cotangent: Array
) -> tuple[PyTree, PyTree, Array, PyTree]:
    """Go on to the inputs, and leave the parameters' own gradient out: nobody asks for it."""
    state, given, inputs = residuals
    layer = nnx.merge(graphdef, state)
    _, pull_back = jax.vjp(layer, inputs)
    none = jax.tree.map(jnp.zeros_like, (state, given))
    return *none, pull_back(cotangent)[0], measure(layer, given, inputs, cotangent)


_probe.defvjp(_probe_forward, _probe_backward)
