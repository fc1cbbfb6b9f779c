"""Layers as Flax NNX modules, each with its precision and its own per-example gradient metrics.

Dense layers have the batch as the first axis, convolutions as the last (see `arithmetic`).
"""

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key, PyTree

from gradtrail.core.nn.arithmetic import (
    Precision,
    convolve,
    convolve_for_inference,
    matmul,
    matmul_transposed,
    patches_and_cotangents,
    rematerialized,
    rounded,
)

_EPSILON = 1e-5  # added to a variance before its root is taken
_LARGEST_GRAD = 2.0**32  # absolute entry of a gradient to be clipped, so that its squared norm is finite
ROUNDING = 2.0**-23  # twice the largest relative error of a float32 operation: n of them err by less than n times it

_he_normal = nnx.initializers.he_normal()


class Layer(nnx.Module):
    """A module with parameters whose outputs for an example depend on that example alone.

    The methods below compute float32 metrics of each example's gradient with respect to the layer's parameters, from
    the inputs of the layer and the cotangent of its outputs; each loss depends on its own example alone. A layer
    overrides those that it can compute faster. The defaults form the gradients by `grads`, whose own default is the
    definition by `jax.vjp`. A gradient as a vector is in the order of `ravel_pytree`: by name, so the bias comes first.
    """

    batch_axis = 0  # axis of the batch in inputs and outputs

    def grads(self, inputs: Float[Array, "..."], cotangent: Float[Array, "..."]) -> Float[Array, "batch parameters"]:
        """Return the gradient of each example with respect to the parameters, as a vector."""
        graphdef, state = nnx.split(self)

        def grad(example: Array, example_cotangent: Array) -> Array:
            batch = jnp.expand_dims(example, self.batch_axis)
            _, pull_back = jax.vjp(lambda state: nnx.merge(graphdef, state)(batch), state)
            return ravel_pytree(pull_back(jnp.expand_dims(example_cotangent, self.batch_axis))[0])[0]

        return jax.vmap(grad, in_axes=self.batch_axis)(inputs, cotangent)

    def squared_grad_norms(self, inputs: Float[Array, "..."], cotangent: Float[Array, "..."]) -> Float[Array, " batch"]:
        """Return the squared L2 norm of each example's gradient."""
        return _squared_norm(self.grads(inputs, cotangent))

    def grad_dots(
        self, inputs: Float[Array, "..."], cotangent: Float[Array, "..."], directions: PyTree[Float[Array, "..."]]
    ) -> Float[Array, "batch directions"]:
        """Return the inner product of each example's gradient with each direction, which is like the parameters."""
        return self.grads(inputs, cotangent) @ jax.vmap(lambda direction: ravel_pytree(direction)[0])(directions).T

    def clip_terms(
        self, inputs: Float[Array, "..."], cotangent: Float[Array, "..."], copies: int
    ) -> tuple[Float[Array, " examples"], PyTree[Float[Array, "..."]]]:
        """Return an upper bound of the squared L2 norm of each example's gradient, and the terms of `weighted_grad`.

        The gradient of an example is the sum of those of `copies` adjacent rows of the batch. The bound holds for
        the term that `weighted_grad` adds, with the rounding of all operations, in any order of summation.
        """
        grads = jnp.nan_to_num(_sum_copies(self.grads(inputs, cotangent), copies))
        grads = jnp.clip(grads, -_LARGEST_GRAD, _LARGEST_GRAD)
        side = math.ceil(math.sqrt(grads.shape[1]))  # a sum of sums errs less
        square = jnp.pad(grads, ((0, 0), (0, side**2 - grads.shape[1]))).reshape(-1, side, side)
        return _squared_norm_bound(square), grads

    def weighted_grad(
        self, terms: PyTree[Float[Array, "..."]], weights: Float[Array, " examples"]
    ) -> PyTree[Float[Array, "..."]]:
        """Return the sum of the examples' gradients, each times its weight, like the parameters.

        Called on a layer with abstract arrays too; `terms` are those of `clip_terms`.
        """
        template = jax.tree.map(jnp.zeros_like, nnx.to_pure_dict(nnx.state(self, nnx.Param)))
        return ravel_pytree(template)[1](weights @ terms)


ActivationKind = Literal["relu", "tanh", "gelu", "silu"]
Tap: TypeAlias = Callable[[Layer, Array], Array]


def identity_tap(layer: Layer, inputs: Float[Array, "..."]) -> Float[Array, "..."]:
    """Apply a layer; other taps also record its inputs or replace it."""
    outputs: Array = layer(inputs)
    return outputs


class Dense(Layer):
    """A linear map and a bias; weights drawn as by He et al. (arXiv 1502.01852), biases zero."""

    def __init__(self, num_inputs: int, num_outputs: int, precision: Precision, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_he_normal(rngs.params(), (num_inputs, num_outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_outputs))
        self.precision = precision

    def __call__(self, inputs: Float[Array, "batch inputs"]) -> Float[Array, "batch outputs"]:
        return matmul(inputs, self.kernel[...], self.precision) + self.bias[...][None]

    def grads(self, inputs: Array, cotangent: Array) -> Array:
        """Return a δᵀ for each example, after the gradient of its bias, δ."""
        low_inputs, low = self._rounded(inputs, cotangent)
        kernel_grads = low_inputs[:, :, None] * low[:, None, :]
        return jnp.concatenate([cotangent, kernel_grads.reshape(len(inputs), -1)], axis=1)

    def squared_grad_norms(self, inputs: Array, cotangent: Array) -> Array:
        """Return (‖a‖² + 1) ‖δ‖² for each example (Goodfellow, arXiv 1510.01799): its gradient is the product a δᵀ."""
        low_inputs, low = self._rounded(inputs, cotangent)
        return _squared_norm(low_inputs) * _squared_norm(low) + _squared_norm(cotangent)

    def grad_dots(self, inputs: Array, cotangent: Array, directions: PyTree) -> Array:
        """Return aᵀ V δ for each example and direction V, without forming the gradient a δᵀ."""
        low_inputs, low = self._rounded(inputs, cotangent)

        def dot(direction: PyTree) -> Array:
            return jnp.sum((low_inputs @ direction["kernel"]) * low, axis=1) + cotangent @ direction["bias"]

        return jax.vmap(dot, out_axes=1)(directions)

    def clip_terms(self, inputs: Array, cotangent: Array, copies: int) -> tuple[Array, PyTree]:
        """Return inputs and cotangents as terms, and norms that are computed without forming gradients.

        The gradient of a row is the product of its cotangent and of its inputs, to which the bias adds a 1. Gradients
        of several rows may cancel; the errors are relative to the sum of their norms, and added to the norm.
        """
        rows = rounded(inputs, self.precision)
        squared = (_squared_norm_bound(rows) + 1.0) * _squared_norm_bound(cotangent)
        total = jnp.sum(jnp.sqrt(squared).reshape(-1, copies), axis=1)
        norm = total if copies == 1 else _norm_of_sum(rows, cotangent, total)
        eps = float(jnp.finfo(self.precision).eps)  # type: ignore[no-untyped-call] # twice the error of an operand
        return jnp.square(norm + (eps + (copies + 8) * ROUNDING) * total), (inputs, cotangent)

    def weighted_grad(self, terms: tuple[Array, Array], weights: Array) -> PyTree:
        """Return A Δ'ᵀ, where Δ' are the cotangents times the weights."""
        inputs, cotangent = terms
        scaled = cotangent * jnp.repeat(weights, len(cotangent) // len(weights))[:, None]
        return {"bias": jnp.sum(scaled, axis=0), "kernel": matmul_transposed(inputs, scaled, self.precision)}

    def _rounded(self, *operands: Array) -> list[Array]:
        return [rounded(operand, self.precision) for operand in operands]


class Convolution(Layer):
    """A convolution with stride 1, zeros beyond the edges, and a bias; initial weights as those of `Dense`."""

    batch_axis = -1

    def __init__(self, size: int, num_inputs: int, num_outputs: int, precision: Precision, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_he_normal(rngs.params(), (size, size, num_inputs, num_outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_outputs))
        self.precision = precision

    def __call__(self, inputs: Float[Array, "inputs height width batch"]) -> Float[Array, "outputs height width batch"]:
        outputs = convolve(inputs, self.kernel[...], self.precision)
        rows = outputs.reshape(len(outputs), -1)
        return (rows + self.bias[...][:, None]).reshape(outputs.shape)

    def infer(self, inputs: Float[Array, "inputs height width batch"]) -> Float[Array, "outputs height width batch"]:
        """Return the same outputs, for inference outside of loops; see `convolve_for_inference`."""
        return convolve_for_inference(inputs, self.kernel[...], self.precision) + self.bias[...][:, None, None, None]

    def grads(self, inputs: Array, cotangent: Array) -> Array:
        bias, kernel = self._bias_and_kernel_grads(inputs, cotangent)
        return jnp.concatenate([bias, kernel.reshape(len(kernel), -1)], axis=1)

    def squared_grad_norms(self, inputs: Array, cotangent: Array) -> Array:
        """Return the squared norms, from gradients or from all pairs of pixels, whichever needs fewer FLOPs.

        With patches A and cotangents Δ of all pixels of an example, the gradient is A Δᵀ, and its squared norm also the
        sum of (AᵀA) ∘ (ΔᵀΔ): the ghost norm of Bu et al. (arXiv 2205.10683).
        """
        *window, outer = self.kernel.shape
        inner, pixels = math.prod(window), inputs[0, ..., 0].size
        if inner * outer <= pixels * (inner + outer):
            return _squared_norm(self.grads(inputs, cotangent))
        columns, deltas = self._patches_and_cotangents(inputs, cotangent)
        pairs = jnp.einsum("bip,biq->bpq", columns, columns) * jnp.einsum("bpo,bqo->bpq", deltas, deltas)
        return jnp.sum(pairs, axis=(1, 2)) + jnp.sum(jnp.square(jnp.sum(cotangent, axis=(1, 2))), axis=0)

    def clip_terms(self, inputs: Array, cotangent: Array, copies: int) -> tuple[Array, PyTree]:
        """Return the gradients as terms: norms from pairs of pixels may cancel and save little time here."""
        bias, kernel = (_sum_copies(grads, copies) for grads in self._bias_and_kernel_grads(inputs, cotangent))
        return _squared_norm_bound(bias) + _squared_norm_bound(kernel), {"bias": bias, "kernel": kernel}

    def weighted_grad(self, terms: dict[str, Array], weights: Array) -> PyTree:
        kernel = terms["kernel"].reshape(len(weights), -1)
        return {"bias": weights @ terms["bias"], "kernel": (weights @ kernel).reshape(self.kernel.shape)}

    def _bias_and_kernel_grads(self, inputs: Array, cotangent: Array) -> tuple[Array, Array]:
        columns, deltas = self._patches_and_cotangents(inputs, cotangent)
        return jnp.sum(cotangent, axis=(1, 2)).T, jnp.einsum("bip,bpo->bio", columns, deltas)

    def _patches_and_cotangents(self, inputs: Array, cotangent: Array) -> tuple[Array, Array]:
        low = rounded(inputs, self.precision), rounded(cotangent, self.precision)
        return patches_and_cotangents(*low, len(self.kernel[...]))


class Norm(Layer):
    """Standardizes activations, then scales and shifts each channel."""

    batch_axis = -1

    def __init__(self, num_channels: int):
        self.scale = nnx.Param(jnp.ones(num_channels))
        self.bias = nnx.Param(jnp.zeros(num_channels))

    def __call__(self, inputs: Float[Array, "channels height width batch"]) -> Array:
        scale, bias = (param[...][:, None, None, None] for param in (self.scale, self.bias))
        return self.standardized(inputs) * scale + bias

    def standardized(self, inputs: Float[Array, "channels height width batch"]) -> Array:
        """Return activations of mean 0 and variance 1."""
        raise NotImplementedError

    def grads(self, inputs: Array, cotangent: Array) -> Array:
        scale_grads = jnp.sum(self.standardized(inputs) * cotangent, axis=(1, 2))
        return jnp.concatenate([jnp.sum(cotangent, axis=(1, 2)), scale_grads]).T


class GroupNorm(Norm):
    """Normalizes each example's channels in groups, over the group and all pixels (Wu and He, arXiv 1803.08494)."""

    def __init__(self, num_channels: int, num_groups: int):
        super().__init__(num_channels)
        self.num_groups = num_groups

    def standardized(self, inputs: Array) -> Array:
        grouped = inputs.reshape(self.num_groups, -1, *inputs.shape[1:])
        return _standardized(grouped).reshape(inputs.shape)


class LayerNorm(Norm):
    """Normalizes each pixel of each example over its channels (Ba et al., arXiv 1607.06450)."""

    def standardized(self, inputs: Array) -> Array:
        centered = inputs - jnp.mean(inputs, axis=0, keepdims=True)
        return centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=0, keepdims=True) + _EPSILON)


def _standardized(inputs: Float[Array, "groups channels height width batch"]) -> Array:
    """Return activations with mean 0 and variance 1 over the channels of a group and all pixels, for each example."""
    centered = inputs - _mean(inputs)
    return centered * jax.lax.rsqrt(_mean(jnp.square(centered)) + _EPSILON)


def _mean(inputs: Float[Array, "groups channels height width batch"]) -> Float[Array, "groups 1 1 1 batch"]:
    """Return means over all axes but the first and the last.

    Whole rows are added up first: XLA's CPU backend vectorizes sums of long rows, not those that keep the batch alone.
    """
    groups, channels, height, width, batch = inputs.shape
    rows = jnp.sum(inputs.reshape(groups, channels * height, width * batch), axis=1)
    sums = jnp.sum(rows.reshape(groups, width, batch), axis=1)
    return sums.reshape(groups, 1, 1, 1, batch) / (channels * height * width)


def batch_last(
    images: Float[Array, "batch height width *channels"],
) -> Float[Array, "channels height width batch"]:
    """Return images in the layout of convolutions; grayscale images have one channel."""
    return jnp.moveaxis(images, 0, -1)[None] if images.ndim == 3 else jnp.transpose(images, (3, 1, 2, 0))


def apply_block(
    block: nnx.Module, inputs: Float[Array, "channels height width batch"], tap: Tap, *, remat: bool
) -> Array:
    """Apply a module that is called with inputs and tap; with `remat` and no tap, its backward pass recomputes it."""
    if not remat or tap is not identity_tap:
        return block(inputs, tap)
    graphdef, state = nnx.split(block)
    return rematerialized(lambda state, inputs: nnx.merge(graphdef, state)(inputs, identity_tap))(state, inputs)


def activate(inputs: Array, kind: ActivationKind) -> Array:
    functions = {"relu": jax.nn.relu, "tanh": jnp.tanh, "gelu": jax.nn.gelu, "silu": jax.nn.silu}
    return functions[kind](inputs)


def dropout(
    inputs: Float[Array, "batch features"], rate: float, key: Key[Array, " batch"] | None
) -> Float[Array, "batch features"]:
    """Set a random share of the inputs to zero and scale the rest by 1 / (1 - rate) (Srivastava et al., JMLR 15, 2014).

    There is one key per example, so that its dropout depends on no other example; None for no dropout.
    """
    if key is None or not rate:
        return inputs
    mask = jax.vmap(lambda one: jax.random.bernoulli(one, 1.0 - rate, inputs.shape[1:]))(key)
    return jnp.where(mask, inputs / (1.0 - rate), 0.0)


def folded(key: Key[Array, " batch"] | None, index: int) -> Key[Array, " batch"] | None:
    """Return the keys for one of several uses of `key`."""
    return None if key is None else jax.vmap(jax.random.fold_in, (0, None))(key, index)


def _squared_norm(rows: Array) -> Array:
    return jnp.sum(jnp.square(rows), axis=tuple(range(1, rows.ndim)))


def _squared_norm_bound(rows: Float[Array, "batch ..."]) -> Float[Array, " batch"]:
    """Return an upper bound of the squared L2 norm of each entry of the leading axis, for any order of the sums."""
    sums = jax.lax.optimization_barrier(jnp.sum(jnp.square(rows), axis=-1))  # two short sums err less than a long one
    operations = rows.shape[-1] + math.prod(sums.shape[1:]) + 4
    return jnp.sum(sums, axis=tuple(range(1, sums.ndim))) * (1.0 + operations * ROUNDING)


def _norm_of_sum(
    inputs: Float[Array, "rows inputs"], deltas: Float[Array, "rows outputs"], totals: Float[Array, " examples"]
) -> Float[Array, " examples"]:
    """Return an upper bound of the norm of the sum of an example's gradients, from pairs of its rows.

    With rows a (and a 1) and cotangents δ, the squared norm is the sum of (a·a' + 1)(δ·δ') over all pairs. The
    rounding error is relative to the sum of absolute terms, which the square of `totals` bounds.
    """
    inputs, deltas = (part.reshape(len(totals), -1, part.shape[1]) for part in (inputs, deltas))
    products = (jnp.einsum("bpi,bqi->bpq", inputs, inputs) + 1.0) * jnp.einsum("bpo,bqo->bpq", deltas, deltas)
    sums = jax.lax.optimization_barrier(jnp.sum(products, axis=2))
    operations = inputs.shape[2] + deltas.shape[2] + 2 * inputs.shape[1] + 8
    return jnp.sqrt(jnp.maximum(jnp.sum(sums, axis=1), 0.0) + operations * ROUNDING * jnp.square(totals))


def _sum_copies(rows: Float[Array, "rows ..."], copies: int) -> Float[Array, "examples ..."]:
    return jnp.sum(rows.reshape(-1, copies, *rows.shape[1:]), axis=1)
