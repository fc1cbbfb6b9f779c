"""Norms, inner products and clipped sums of per-example gradients, from one backward pass.

The backward pass gives the cotangents of all layers' outputs; from these and its inputs each layer computes norms and
inner products of its own gradients (`nn.layers.Layer`), which are not formed. Tests compare all of it with the
definition, `vmap(grad)`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt8

from gradtrail.core import batching
from gradtrail.core.nn.layers import ROUNDING, Layer
from gradtrail.core.nn.losses import Loss
from gradtrail.core.nn.models import Model, Params, by_path
from gradtrail.core.nn.own import OtherLayer

Images: TypeAlias = UInt8[Array, "batch height width *channels"]
Labels: TypeAlias = Int[Array, " batch"]
Measure: TypeAlias = Callable[[Layer, PyTree, Array, Array], PyTree]
Forward: TypeAlias = Callable[[Callable[[str, Layer, Array], Array]], tuple[Array, Array]]

_LARGEST = 2.0**16  # absolute activation or cotangent in a private training: sums of products stay finite
_UNDERFLOW = 2.0**-48  # more than a squared norm loses by squares below 2⁻¹²⁶, where no factor is above `_LARGEST`


def layer_metrics(
    model: Model, forward: Forward, measure: Measure, extra: Mapping[str, PyTree] | None = None
) -> tuple[dict[str, PyTree], Float[Array, "batch classes"]]:
    """Evaluate `measure` on each layer's inputs and the cotangents of its outputs, in one backward pass.

    No gradient with respect to parameters is formed. Results of `measure`, and `extra`, are by the layer's name.

    Args:
        forward: tap → (sum of the losses of a batch, logits), see `forward_of`.
        measure: (layer, its entry of `extra`, inputs, cotangent) → pytree of float32 arrays.
    """
    (_, by_layer), logits = _backward(model, (), lambda _: forward, measure, extra)
    return by_layer, logits


def _backward(
    model: Model,
    params: PyTree,
    forward_at: Callable[[Any], Forward],
    measure: Measure,
    extra: Mapping[str, PyTree] | None = None,
) -> tuple[tuple[PyTree, dict[str, PyTree]], Array]:
    """Return the gradient by `params` and the results of `measure`, both of one backward pass, and the logits."""
    extra = extra or dict.fromkeys(model.layers(), ())
    probes: dict[str, PyTree] = {}

    def abstract_tap(name: str, layer: Layer, inputs: Array) -> Array:
        outputs: Array = layer(inputs)  # the cotangent has the same shape
        probes[name] = jax.eval_shape(functools.partial(measure, layer), extra[name], inputs, outputs)
        return outputs

    def tap(name: str, layer: Layer, inputs: Array) -> Array:
        graphdef, state = nnx.split(layer)
        return _probe(graphdef, measure, state, extra[name], inputs, probes[name])

    def total_loss(params: PyTree, perturbed: dict[str, PyTree]) -> tuple[Array, Array]:
        probes.update(perturbed)
        return forward_at(params)(tap)

    jax.eval_shape(lambda: forward_at(params)(abstract_tap))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), probes)
    return jax.grad(total_loss, argnums=(0, 1), has_aux=True)(params, zeros)


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
    """Return the cotangents of parameters and inputs, and the result of `measure`; those not used are not computed."""
    state, extra, inputs = residuals
    _, pull_back = jax.vjp(lambda state, inputs: nnx.merge(graphdef, state)(inputs), state, inputs)
    measured = measure(nnx.merge(graphdef, state), extra, inputs, cotangent)
    grads, input_cotangent = pull_back(cotangent)
    return grads, jax.tree.map(jnp.zeros_like, extra), input_cotangent, measured


_probe.defvjp(_probe_forward, _probe_backward)


def forward_of(
    model: Model, params: Params, images: Array, labels: Array, loss: Loss, key: Array | None = None
) -> Forward:
    """Return the forward pass of a batch for `layer_metrics`; `key` is for dropout, one for each example."""

    def forward(tap: Callable[[str, Layer, Array], Array]) -> tuple[Array, Array]:
        logits = model.apply(params, images, key=key, tap=tap)
        return jnp.sum(loss.per_example(logits, labels)), logits

    return forward


def _squared_norms(layer: Layer, _: PyTree, inputs: Array, cotangent: Array) -> Array:
    return layer.squared_grad_norms(inputs, cotangent)


def squared_grad_norms(
    model: Model, params: Params, images: Images, labels: Labels, *, loss: Loss
) -> tuple[dict[str, Float[Array, " batch"]], Float[Array, "batch classes"]]:
    """Return the squared L2 norm of each example's gradient for each layer, float32, and the logits."""
    return layer_metrics(model, forward_of(model, params, images, labels, loss), _squared_norms)


def grad_dots(
    model: Model, params: Params, images: Images, labels: Labels, directions: Params, *, loss: Loss
) -> Float[Array, "batch directions"]:
    """Return the inner product of each example's gradient with each direction, such as the mean gradient, float32.

    `directions` is like `params` with a leading axis of directions.
    """

    def measure(layer: Layer, directions: PyTree, inputs: Array, cotangent: Array) -> Array:
        return layer.grad_dots(inputs, cotangent, directions)

    forward = forward_of(model, params, images, labels, loss)
    by_layer, _ = layer_metrics(model, forward, measure, model.split_by_layer(directions))
    return sum(by_layer.values(), start=jnp.float32(0))


def squared_grad_norms_and_sum(
    model: Model, params: Params, images: Images, labels: Labels, mask: Bool[Array, " batch"], *, loss: Loss
) -> tuple[dict[str, Float[Array, " batch"]], Float[Array, "batch classes"], Params]:
    """Return what `squared_grad_norms` does, and the sum of the gradients of the examples where `mask` is true.

    The sum is like `params`, float32; the norms of the other examples are 0.
    """

    def forward_at(params: Params) -> Forward:
        def forward(tap: Callable[[str, Layer, Array], Array]) -> tuple[Array, Array]:
            logits = model.apply(params, images, tap=tap)
            return batching.masked_sum(loss.per_example(logits, labels), mask), logits

        return forward

    (grads, by_layer), logits = _backward(model, params, forward_at, _squared_norms)
    return by_layer, logits, grads


def unknown_layers(model: Model) -> list[str]:
    """Return the layers whose gradients are computed by the slow definition, with the modules that they consist of."""
    return [
        f"{name} ({', '.join(_parts(layer))})" if isinstance(layer, OtherLayer) else name
        for name, layer in model.layers().items()
        if (type(layer).grads, type(layer).squared_grad_norms) == (Layer.grads, Layer.squared_grad_norms)
    ]


def _parts(layer: Layer) -> list[str]:
    """Return the classes of the modules that have parameters of their own within a layer, sorted."""
    modules = [module for _, module in nnx.iter_modules(layer)]
    with_params = [module for module in modules if any(isinstance(value, nnx.Param) for value in vars(module).values())]
    return sorted({type(module).__name__ for module in with_params} or {"functions"})


@dataclass(frozen=True, kw_only=True)
class Clipping:
    norm: float  # L2 norm to which larger gradients are scaled down
    # rows of each example, such as augmentations of it, whose mean gradient is clipped (De et al., arXiv 2204.13650)
    copies: int
    loss: Loss
    frozen: frozenset[str] = frozenset()  # names of the layers whose gradients count as 0


def clipped_grad_sum(
    model: Model,
    params: Params,
    images: UInt8[Array, "rows height width *channels"] | Float[Array, "rows height width *channels"],
    labels: Int[Array, " rows"],
    mask: Bool[Array, " examples"],
    clipping: Clipping,
    *,
    key: Key[Array, " rows"] | None = None,
) -> tuple[Params, Float[Array, " examples"], Float[Array, "rows classes"]]:
    """Return Σᵢ gᵢ min(1, C / nᵢ) over the examples where `mask` is true, all nᵢ, and the logits.

    gᵢ is the gradient of the mean loss of the rows of example i in `bounded_forward`, and nᵢ an upper bound of its L2
    norm. Each term is finite and no term has a norm above C: nᵢ includes all rounding.

    From a layer's inputs and cotangents follow the norm of each example's gradient, so its clip factor, and then the
    sum of the gradients times their factors: as the product of the inputs with the scaled cotangents, or of gradients
    that were formed for the norm. Ghost clipping (Li et al., arXiv 2110.05679) makes a second backward pass of the
    reweighted loss for that; keeping the cotangents is the book-keeping of Bu et al. (arXiv 2210.00038).

    Args:
        images: float32 in 0..1, or uint8 pixels; `copies` adjacent rows for each example.
        key: one key per row for dropout; None for no dropout.
    """
    full_precision = jax.default_matmul_precision("highest")  # for accelerators, which may round operands further

    def measure(layer: Layer, _: PyTree, inputs: Array, cotangent: Array) -> tuple[Array, PyTree]:
        with full_precision:
            return layer.clip_terms(inputs, cotangent, clipping.copies)

    forward = bounded_forward(forward_of(model, params, images, labels, clipping.loss, key))
    by_layer, logits = layer_metrics(model, forward, measure)
    bounds = (bound for name, (bound, _) in by_layer.items() if name not in clipping.frozen)
    squared = sum(bounds, start=jnp.float32(_UNDERFLOW))
    norms = jnp.sqrt(squared) * (1.0 + (len(by_layer) + 16) * ROUNDING) / clipping.copies
    weights = jnp.where(mask, jnp.minimum(1.0, clipping.norm / norms) / clipping.copies, 0.0)
    none = jnp.zeros_like(weights) if clipping.frozen else weights
    with full_precision:
        grads = {
            f"{name}/{path}": grad
            for name, layer in model.layers().items()
            for path, grad in by_path(
                layer.weighted_grad(by_layer[name][1], none if name in clipping.frozen else weights)
            ).items()
        }
    return model.from_paths(grads), norms, logits


def bounded_forward(forward: Forward) -> Forward:
    """Return a forward pass in which an example whose values overflow has finite gradients.

    Inputs, outputs and cotangents of every layer are limited to an absolute value of 2¹⁶, and NaN becomes 0: no example
    can make a sum of gradients infinite or NaN, and none has to be left out.
    """
    return lambda tap: forward(lambda name, layer, inputs: _bounded(tap(name, layer, _bounded(inputs))))


@jax.custom_vjp
def _bounded(values: Array) -> Array:
    """Limit values, and cotangents in the backward pass.

    By selects alone: with `jnp.clip`, a private step of the default CNN takes 1.4 times as long on a CPU.
    """
    limit = jnp.where(values > 0, _LARGEST, jnp.where(values < 0, -_LARGEST, 0.0))  # of NaN, 0
    return jnp.where(jnp.abs(values) <= _LARGEST, values, limit)


_bounded.defvjp(lambda values: (_bounded(values), None), lambda _, cotangent: (_bounded(cotangent),))
