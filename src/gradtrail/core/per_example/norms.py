"""Exact norms and inner products of per-example gradients, without forming the gradients.

One backward pass gives the cotangents of all layers' outputs; from these and its inputs each layer computes norms and
inner products of its own gradients (`nn.layers.Layer`). Tests compare all of it with the definition, `vmap(grad)`.
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

Images: TypeAlias = UInt8[Array, "batch height width"]
Labels: TypeAlias = Int[Array, " batch"]
Keys: TypeAlias = Key[Array, " batch"]
Measure: TypeAlias = Callable[[Layer, PyTree, Array, Array], PyTree]
Forward: TypeAlias = Callable[[Callable[[str, Layer, Array], Array]], tuple[Array, Array]]
Signals: TypeAlias = dict[str, tuple[Array, Array]]


def layer_metrics(
    model: Model, forward: Forward, measure: Measure, extra: Mapping[str, PyTree] | None = None
) -> tuple[dict[str, PyTree], Float[Array, "batch classes"]]:
    """Evaluate `measure` on each layer's inputs and the cotangents of its outputs, in one backward pass.

    No gradient with respect to parameters is formed.

    Args:
        forward: tap → (sum of the losses of a batch, logits), see `forward_of`.
        measure: (layer, its entry of `extra`, inputs, cotangent) → pytree of float32 arrays.
        extra: name of a layer → pytree of arrays for `measure`.

    Returns:
        Name of a layer → result of `measure`; the logits.
    """
    extra = extra or dict.fromkeys(model.layers(), ())
    probes: dict[str, PyTree] = {}

    def abstract_tap(name: str, layer: Layer, inputs: Array) -> Array:
        outputs: Array = layer(inputs)  # the cotangent has the same shape
        probes[name] = jax.eval_shape(functools.partial(measure, layer), extra[name], inputs, outputs)
        return outputs

    def tap(name: str, layer: Layer, inputs: Array) -> Array:
        graphdef, state = nnx.split(layer)
        return _probe(graphdef, measure, state, extra[name], inputs, probes[name])

    def total_loss(perturbed: dict[str, PyTree]) -> tuple[Array, Array]:
        probes.update(perturbed)
        return forward(tap)

    jax.eval_shape(lambda: forward(abstract_tap))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), probes)
    return jax.grad(total_loss, has_aux=True)(zeros)


def forward_of(
    model: Model, params: Params, images: Array, labels: Array, label_smoothing: float, key: Array | None = None
) -> Forward:
    """Return the forward pass of a batch for `layer_metrics`; `key` is for dropout, one for each example."""

    def forward(tap: Callable[[str, Layer, Array], Array]) -> tuple[Array, Array]:
        logits = model.apply(params, images, key=key, tap=tap)
        return jnp.sum(losses.cross_entropy(logits, labels, label_smoothing=label_smoothing)), logits

    return forward


def squared_grad_norms(
    model: Model, params: Params, images: Images, labels: Labels, *, label_smoothing: float, key: Keys | None = None
) -> tuple[dict[str, Float[Array, " batch"]], Float[Array, "batch classes"]]:
    """Return the squared L2 norm of each example's gradient for each layer, float32, and the logits.

    Args:
        params: parameters at which the gradients are taken.
        labels: class of each example, int32.
        key: one key per example for dropout; None for no dropout.
    """

    def measure(layer: Layer, _: PyTree, inputs: Array, cotangent: Array) -> Array:
        return layer.squared_grad_norms(inputs, cotangent)

    return layer_metrics(model, forward_of(model, params, images, labels, label_smoothing, key), measure)


def grad_dots(
    model: Model,
    params: Params,
    images: Images,
    labels: Labels,
    directions: Params,
    *,
    label_smoothing: float,
    key: Keys | None = None,
) -> Float[Array, "batch directions"]:
    """Return the inner product of each example's gradient with each direction, such as the mean gradient, float32.

    Arguments are those of `squared_grad_norms`; `directions` is like `params` with a leading axis of directions.
    """

    def measure(layer: Layer, directions: PyTree, inputs: Array, cotangent: Array) -> Array:
        return layer.grad_dots(inputs, cotangent, directions)

    forward = forward_of(model, params, images, labels, label_smoothing, key)
    by_layer, _ = layer_metrics(model, forward, measure, model.split_by_layer(directions))
    return sum(by_layer.values(), start=jnp.float32(0))


def signals(model: Model, params: Params, images: Images, labels: Labels, *, label_smoothing: float) -> Signals:
    """Return the inputs of each layer and the cotangents of its outputs by name; its gradients follow from these."""

    def measure(_: Layer, __: PyTree, inputs: Array, cotangent: Array) -> tuple[Array, Array]:
        return inputs, cotangent

    return layer_metrics(model, forward_of(model, params, images, labels, label_smoothing), measure)[0]


def grad_products(
    model: Model, params: Params, images: Images, labels: Labels, other_signals: Signals, *, label_smoothing: float
) -> Float[Array, "batch others"]:
    """Return the inner products of each example's gradient with those of other examples, float32.

    Arguments are those of `squared_grad_norms`; `other_signals` are the `signals` of the other examples.
    """

    def measure(layer: Layer, other: tuple[Array, Array], inputs: Array, cotangent: Array) -> Array:
        return layer.grad_products(inputs, cotangent, *other)

    by_layer, _ = layer_metrics(
        model, forward_of(model, params, images, labels, label_smoothing), measure, other_signals
    )
    return sum(by_layer.values(), start=jnp.float32(0))


def summed_grad(
    model: Model, params: Params, images: Images, labels: Labels, mask: Bool[Array, " batch"], *, label_smoothing: float
) -> Params:
    """Return the sum of the gradients of the examples where `mask` is true; like `params`, float32."""

    def loss(params: Params) -> Array:
        example_losses = losses.cross_entropy(model.apply(params, images), labels, label_smoothing=label_smoothing)
        return batching.masked_sum(example_losses, mask)

    return jax.grad(loss)(params)


def unknown_layers(model: Model) -> list[str]:
    """Return the names of the layers whose gradients are computed by the slow definition."""
    return [name for name, layer in model.layers().items() if not layer.has_fast_grads]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _probe(graphdef: Any, measure: Measure, state: PyTree, extra: PyTree, inputs: Array, probe: PyTree) -> Array:
    """Apply a layer; the cotangent of `probe`, which the outputs do not depend on, is the result of `measure`."""
    return _probe_forward(graphdef, measure, state, extra, inputs, probe)[0]


def _probe_forward(
    graphdef: Any, _: Measure, state: PyTree, extra: PyTree, inputs: Array, __: PyTree
) -> tuple[Array, tuple[PyTree, PyTree, Array]]:
    return nnx.merge(graphdef, state)(inputs), (state, extra, inputs)


def _probe_backward(
    graphdef: Any, measure: Measure, residuals: tuple[PyTree, PyTree, Array], cotangent: Array
) -> tuple[PyTree, PyTree, Array, PyTree]:
    """Return the inputs' cotangent and the result of `measure`; that of the parameters is not computed."""
    state, extra, inputs = residuals
    layer = nnx.merge(graphdef, state)
    _, pull_back = jax.vjp(layer, inputs)
    zeros = jax.tree.map(jnp.zeros_like, (state, extra))
    return *zeros, pull_back(cotangent)[0], measure(layer, extra, inputs, cotangent)


_probe.defvjp(_probe_forward, _probe_backward)
