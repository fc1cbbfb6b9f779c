"""The MLP-mixer (Tolstikhin et al., arXiv 2105.01601): perceptrons across patches and across channels in turn.

A perceptron that all patches share is a convolution with a kernel of one pixel, and so is one that all channels share,
on the transposed image; their per-example gradients are those of `Convolution`.
"""

import math
from typing import Annotated

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from gradtrail.core.config import Bounds, ConfigError, Share, config
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.layers import ActivationKind, Convolution, LayerNorm, Tap, activate, dropout, folded
from gradtrail.core.nn.mlp import MAX_LAYERS, DenseLayers, Width


@config
class Network:
    """The keys of `train.own`, beside `file`."""

    patch_size: Width = 7  # side of each patch in pixels, a divisor of both sides of the image
    width: Width = 96  # number of channels of each token
    blocks: Annotated[int, Bounds(at_least=1, at_most=MAX_LAYERS // 4)] = 2  # each has four layers
    hidden: tuple[Width, Width] = (64, 192)  # width of the hidden layer of token mixing, and of channel mixing
    activation: ActivationKind = "relu"  # activation of the hidden layers
    dropout: Share = 0.0  # probability with which a training step sets an input of the last layer to zero

    def build(self, shape: tuple[int, ...], num_classes: int, *, precision: Precision, rngs: nnx.Rngs) -> "Mixer":
        """Return the network for images of this shape; raise ConfigError if patches do not cover them exactly."""
        height, width = shape[:2]
        allowed = [size for size in range(1, min(height, width) + 1) if height % size == width % size == 0]
        if self.patch_size not in allowed:
            raise ConfigError(
                f"train.own.patch_size must divide both sides of images of {height} × {width} pixels: "
                f"allowed are {', '.join(map(str, allowed))}, got {self.patch_size}"
            )
        num_tokens = height * width // self.patch_size**2
        num_inputs = self.patch_size**2 * math.prod(shape[2:])
        return Mixer(self, num_inputs, num_tokens, num_classes, precision=precision, rngs=rngs)


class MixerBlock(nnx.Module):
    """Token mixing and channel mixing, each a normalization and a perceptron of two layers beside an identity."""

    def __init__(self, mixer: Network, num_tokens: int, *, precision: Precision, rngs: nnx.Rngs):
        for_tokens, for_channels = mixer.hidden
        self.token_norm = LayerNorm(mixer.width)
        self.token_in = Convolution(1, num_tokens, for_tokens, precision, rngs=rngs)
        self.token_out = Convolution(1, for_tokens, num_tokens, precision, rngs=rngs)
        self.channel_norm = LayerNorm(mixer.width)
        self.channel_in = Convolution(1, mixer.width, for_channels, precision, rngs=rngs)
        self.channel_out = Convolution(1, for_channels, mixer.width, precision, rngs=rngs)
        self.activation = mixer.activation

    def __call__(self, inputs: Float[Array, "channels tokens 1 batch"], tap: Tap) -> Array:
        by_token = jnp.swapaxes(tap(self.token_norm, inputs), 0, 1)
        hidden = activate(tap(self.token_in, by_token), self.activation)
        mixed = inputs + jnp.swapaxes(tap(self.token_out, hidden), 0, 1)
        hidden = activate(tap(self.channel_in, tap(self.channel_norm, mixed)), self.activation)
        return mixed + tap(self.channel_out, hidden)


class Mixer(DenseLayers):
    """The embedding of patches, the blocks, a normalization, and a dense layer on the mean of all tokens."""

    def __init__(
        self,
        mixer: Network,
        num_inputs: int,
        num_tokens: int,
        num_classes: int,
        *,
        precision: Precision,
        rngs: nnx.Rngs,
    ):
        self.embedding = Convolution(1, num_inputs, mixer.width, precision, rngs=rngs)
        self.blocks = nnx.List(
            MixerBlock(mixer, num_tokens, precision=precision, rngs=rngs) for _ in range(mixer.blocks)
        )
        self.norm = LayerNorm(mixer.width)
        self.patch_size = mixer.patch_size
        super().__init__([mixer.width, num_classes], dropout=mixer.dropout, precision=precision, rngs=rngs)

    def __call__(
        self, inputs: Float[Array, "batch height width *channels"], key: Key[Array, " batch"] | None, tap: Tap
    ) -> Array:
        activations = tap(self.embedding, _patches(inputs, self.patch_size))
        for block in self.blocks:
            activations = block(activations, tap)
        features = jnp.mean(tap(self.norm, activations), axis=(1, 2)).T
        return self.classify(dropout(features, self.dropout, folded(key, len(self.layers))), key, tap)


def _patches(images: Float[Array, "batch height width *channels"], size: int) -> Float[Array, "inputs patches 1 batch"]:
    """Return the pixels of the patches that tile each image, row by row, each with all of its channels."""
    batch, height, width = images.shape[:3]
    num_patches = height * width // size**2
    tiles = images.reshape(batch, height // size, size, width // size, size, -1)
    return jnp.transpose(tiles, (2, 4, 5, 1, 3, 0)).reshape(-1, num_patches, 1, batch)
