"""A residual network with normalization before each convolution (He et al., arXiv 1603.05027)."""

from typing import Annotated

import jax
import jax.numpy as jnp
from flax import nnx

from gradtrail.core.config import Bounds, config


@config
class Network:
    """The keys of `train.own`, beside `file`."""

    width: Annotated[int, Bounds(at_least=4, at_most=1024)]  # channels
    blocks: Annotated[int, Bounds(at_least=1, at_most=32)]

    def build(self, shape: tuple[int, ...], num_classes: int, *, rngs: nnx.Rngs) -> nnx.Module:
        return Residual(self, shape[2] if len(shape) == 3 else 1, num_classes, rngs=rngs)


class Residual(nnx.Module):
    def __init__(self, config: Network, num_channels: int, num_classes: int, *, rngs: nnx.Rngs):
        self.stem = Convolution(num_channels, config.width, stride=2, rngs=rngs)
        self.norms = nnx.List(nnx.LayerNorm(config.width, rngs=rngs) for _ in range(config.blocks))
        self.blocks = nnx.List(Convolution(config.width, config.width, rngs=rngs) for _ in range(config.blocks))
        self.head = nnx.Linear(config.width, num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        pixels = images if images.ndim == 4 else images[..., None]
        features = self.stem(pixels)
        for norm, convolution in zip(self.norms, self.blocks, strict=True):
            features = features + convolution(nnx.relu(norm(features)))
        return self.head(jnp.mean(nnx.relu(features), axis=(1, 2)))


class Convolution(nnx.Module):
    """A convolution of 3 × 3 pixels as a product of shifted images: nnx.Conv is slow in a compiled loop on a CPU."""

    def __init__(self, num_inputs: int, num_outputs: int, *, stride: int = 1, rngs: nnx.Rngs):
        self.stride = stride
        self.linear = nnx.Linear(9 * num_inputs, num_outputs, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        height, width = inputs.shape[1:3]
        padded = jnp.pad(inputs, ((0, 0), (1, 1), (1, 1), (0, 0)))
        rows, columns = ([slice(start, start + size, self.stride) for start in range(3)] for size in (height, width))
        shifted = [padded[:, row, column] for row in rows for column in columns]
        return self.linear(jnp.concatenate(shifted, axis=-1))
