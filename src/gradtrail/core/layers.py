"""The layers that networks are made of, as Flax NNX modules that know their precision.

Dense layers have the batch first, convolutions last (see `convolution`).
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from gradtrail.core.convolution import convolve, example_patches
from gradtrail.core.precision import Precision, matmul, rounded

EPSILON = 1e-5  # added to a variance before its root is taken

_he_normal = nnx.initializers.he_normal()


class Layer(nnx.Module):
    """What has parameters, and sends every example through by itself, whatever else is in the batch."""

    batch_axis = 0

    def squared_grad_norms(self, inputs: Float[Array, "..."], cotangent: Float[Array, "..."]) -> Float[Array, " batch"]:
        """Return the squared L2 norm of each example's gradient with respect to the layer's parameters, float32.

        By its definition, the gradients themselves: a layer that knows a cheaper way overrides this.

        Args:
            inputs: of the layer.
            cotangent: of its outputs, from losses of which each depends on its own example alone.
        """
        graphdef, state = nnx.split(self)

        def squared_norm(one: Array, of_one: Array) -> Array:
            batch = jnp.expand_dims(one, self.batch_axis)
            _, pull_back = jax.vjp(lambda state: nnx.merge(graphdef, state)(batch), state)
            (grads,) = pull_back(jnp.expand_dims(of_one, self.batch_axis))
            squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)]
            return jnp.sum(jnp.stack(squares))

        return jax.vmap(squared_norm, in_axes=self.batch_axis)(inputs, cotangent)


Tap: TypeAlias = Callable[[Layer, Array], Array]


def untapped(layer: Layer, inputs: Float[Array, "..."]) -> Float[Array, "..."]:
    """Send inputs through a layer. Whoever wants to see what goes in and comes out hands in another function."""
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

    def squared_grad_norms(self, inputs: Array, cotangent: Array) -> Array:
        """Return (‖a‖² + 1) ‖δ‖² for each example (Goodfellow, arXiv 1510.01799): its gradient is the product a δᵀ."""
        of_kernel = _squared_norm(rounded(inputs, self.precision)) * _squared_norm(rounded(cotangent, self.precision))
        return of_kernel + _squared_norm(cotangent)


class Convolution(Layer):
    """A convolution with stride 1, zeros beyond the edges, and a bias; initial weights as those of `Dense`."""

    batch_axis = -1

    def __init__(self, size: int, num_inputs: int, num_outputs: int, precision: Precision, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_he_normal(rngs.params(), (size, size, num_inputs, num_outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_outputs))
        self.precision = precision

    def __call__(self, inputs: Float[Array, "inputs height width batch"]) -> Float[Array, "outputs height width batch"]:
        return convolve(inputs, self.kernel[...], self.precision) + self.bias[...][:, None, None, None]

    def squared_grad_norms(self, inputs: Array, cotangent: Array) -> Array:
        """Sum up the gradient of each example, or pairs of its pixels, whichever is less work.

        With patches A and cotangents Δ of all pixels of an example, the gradient is A Δᵀ, and its squared norm also the
        sum of (AᵀA) ∘ (ΔᵀΔ): the ghost norm of Bu et al. (arXiv 2205.10683).
        """
        columns = example_patches(rounded(inputs, self.precision), len(self.kernel[...]))
        deltas = jnp.moveaxis(rounded(cotangent, self.precision), -1, 0).reshape(len(columns), len(cotangent), -1)
        pixels, inner, outer = deltas.shape[2], columns.shape[1], deltas.shape[1]
        if inner * outer <= pixels * (inner + outer):
            of_kernel = _squared_norm(jnp.einsum("bip,bop->bio", columns, deltas))
        else:
            pairs = jnp.einsum("bip,biq->bpq", columns, columns) * jnp.einsum("bop,boq->bpq", deltas, deltas)
            of_kernel = jnp.sum(pairs, axis=(1, 2))
        return of_kernel + jnp.sum(jnp.square(jnp.sum(cotangent, axis=(1, 2))), axis=0)


class GroupNorm(Layer):
    """Normalizes each example's channels in groups, over the group and all pixels (Wu and He, arXiv 1803.08494)."""

    batch_axis = -1

    def __init__(self, num_channels: int, num_groups: int):
        self.scale = nnx.Param(jnp.ones(num_channels))
        self.bias = nnx.Param(jnp.zeros(num_channels))
        self.num_groups = num_groups

    def __call__(self, inputs: Float[Array, "channels height width batch"]) -> Array:
        return _scaled(self._standardize(inputs), self.scale[...], self.bias[...])

    def squared_grad_norms(self, inputs: Array, cotangent: Array) -> Array:
        """Return the squared norm of the sums over pixels that are the gradients of scale and bias."""
        return _squared_norm_of_affine(self._standardize(inputs), cotangent)

    def _standardize(self, inputs: Array) -> Array:
        grouped = inputs.reshape(self.num_groups, -1, *inputs.shape[1:])
        return _standardized(grouped, (1, 2, 3)).reshape(inputs.shape)


class LayerNorm(Layer):
    """Normalizes each pixel of each example over its channels (Ba et al., arXiv 1607.06450)."""

    batch_axis = -1

    def __init__(self, num_channels: int):
        self.scale = nnx.Param(jnp.ones(num_channels))
        self.bias = nnx.Param(jnp.zeros(num_channels))

    def __call__(self, inputs: Float[Array, "channels height width batch"]) -> Array:
        return _scaled(_standardized(inputs, (0,)), self.scale[...], self.bias[...])

    def squared_grad_norms(self, inputs: Array, cotangent: Array) -> Array:
        """Return the squared norm of the sums over pixels that are the gradients of scale and bias."""
        return _squared_norm_of_affine(_standardized(inputs, (0,)), cotangent)


def dropout(
    inputs: Float[Array, "batch features"], rate: float, key: Key[Array, " batch"] | None
) -> Float[Array, "batch features"]:
    """Set a share of the inputs to zero and scale the rest to the same mean (Srivastava et al., JMLR 15, 2014).

    Args:
        inputs: activations.
        rate: share that is set to zero, in [0, 1).
        key: one for each example, so that what an example loses depends on no other; None to leave all as it is.
    """
    if key is None or not rate:
        return inputs
    kept = jax.vmap(lambda one: jax.random.bernoulli(one, 1.0 - rate, inputs.shape[1:]))(key)
    return jnp.where(kept, inputs / (1.0 - rate), 0.0)


def _standardized(inputs: Array, axes: tuple[int, ...]) -> Array:
    centered = inputs - jnp.mean(inputs, axis=axes, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=axes, keepdims=True) + EPSILON)


def _scaled(inputs: Array, scale: Array, bias: Array) -> Array:
    return inputs * scale[:, None, None, None] + bias[:, None, None, None]


def _squared_norm(rows: Array) -> Array:
    """Return the squared L2 norm of each entry of the leading axis."""
    return jnp.sum(jnp.square(rows), axis=tuple(range(1, rows.ndim)))


def _squared_norm_of_affine(standardized: Array, cotangent: Array) -> Array:
    of_scale, of_bias = jnp.sum(standardized * cotangent, axis=(1, 2)), jnp.sum(cotangent, axis=(1, 2))
    return jnp.sum(jnp.square(of_scale) + jnp.square(of_bias), axis=0)
