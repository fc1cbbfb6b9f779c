"""The layers that networks are made of, as Flax NNX modules that know their precision.

Dense layers have the batch first, convolutions last (see `convolution`).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from gradtrail.core.convolution import convolve
from gradtrail.core.precision import Precision, matmul

EPSILON = 1e-5  # added to a variance before its root is taken

_he_normal = nnx.initializers.he_normal()


class Dense(nnx.Module):
    """A linear map and a bias; weights drawn as by He et al. (arXiv 1502.01852), biases zero."""

    def __init__(self, num_inputs: int, num_outputs: int, precision: Precision, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_he_normal(rngs.params(), (num_inputs, num_outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_outputs))
        self.precision = precision

    def __call__(self, inputs: Float[Array, "batch inputs"]) -> Float[Array, "batch outputs"]:
        return matmul(inputs, self.kernel[...], self.precision) + self.bias[...][None]


class Convolution(nnx.Module):
    """A convolution with stride 1, zeros beyond the edges, and a bias; initial weights as those of `Dense`."""

    def __init__(self, size: int, num_inputs: int, num_outputs: int, precision: Precision, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_he_normal(rngs.params(), (size, size, num_inputs, num_outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_outputs))
        self.precision = precision

    def __call__(self, inputs: Float[Array, "inputs height width batch"]) -> Float[Array, "outputs height width batch"]:
        return convolve(inputs, self.kernel[...], self.precision) + self.bias[...][:, None, None, None]


class GroupNorm(nnx.Module):
    """Normalizes each example's channels in groups, over the group and all pixels (Wu and He, arXiv 1803.08494)."""

    def __init__(self, num_channels: int, num_groups: int):
        self.scale = nnx.Param(jnp.ones(num_channels))
        self.bias = nnx.Param(jnp.zeros(num_channels))
        self.num_groups = num_groups

    def __call__(self, inputs: Float[Array, "channels height width batch"]) -> Array:
        grouped = inputs.reshape(self.num_groups, -1, *inputs.shape[1:])
        return _scaled(_standardized(grouped, (1, 2, 3)).reshape(inputs.shape), self.scale[...], self.bias[...])


class LayerNorm(nnx.Module):
    """Normalizes each pixel of each example over its channels (Ba et al., arXiv 1607.06450)."""

    def __init__(self, num_channels: int):
        self.scale = nnx.Param(jnp.ones(num_channels))
        self.bias = nnx.Param(jnp.zeros(num_channels))

    def __call__(self, inputs: Float[Array, "channels height width batch"]) -> Array:
        return _scaled(_standardized(inputs, (0,)), self.scale[...], self.bias[...])


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
