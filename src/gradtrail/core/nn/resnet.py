"""The residual network."""

import itertools
import math
from typing import ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from gradtrail.core.config import Bounds, ConfigError, Count, Share, config
from gradtrail.core.names import model_name
from gradtrail.core.nn.arithmetic import Precision, max_pool, space_to_depth
from gradtrail.core.nn.layers import (
    ActivationKind,
    Convolution,
    GroupNorm,
    Tap,
    activate,
    apply_block,
    batch_last,
    dropout,
    folded,
)
from gradtrail.core.nn.mlp import MAX_LAYERS, DenseLayers, Width


@config
class ResNet:
    """Stages of residual blocks with group normalization, then the mean over all pixels and a dense layer.

    Each stage but the first begins with max pooling of 2 × 2. The blocks have their normalizations and activations
    before their convolutions (K. He et al., arXiv 1603.05027).
    """

    kind: ClassVar = "resnet"
    # side of the squares of pixels that the first convolution takes as one pixel with all their channels
    patch: Literal[1, 2, 4, 8]
    channels: tuple[Width, ...]  # channels of each stage, from the input on
    blocks: Count  # number of blocks in each stage
    groups: Count  # number of channel groups of each normalization
    activation: ActivationKind
    dropout: Share  # probability with which a training step sets an input of the dense layer to zero

    def check(self) -> None:
        Bounds(at_least=1).check("channels: number of stages", len(self.channels))
        num_layers = 2 + len(self.channels) * self.blocks * 2
        Bounds(at_most=MAX_LAYERS).check("channels and blocks: number of layers", num_layers)
        if any(count % self.groups for count in self.channels):
            raise ValueError(f"groups must divide every one of channels {list(self.channels)}, got {self.groups}")

    @property
    def name(self) -> str:
        return model_name(self.kind, channels=self.channels)

    def build(
        self, shape: tuple[int, ...], num_classes: int, *, precision: Precision, rngs: nnx.Rngs
    ) -> "ResidualNetwork":
        """Return the network for images of this shape; raise ConfigError if they are not made of whole patches."""
        height, width, *channels = shape
        if height % self.patch or width % self.patch:
            raise ConfigError(
                f"resnet.patch must divide the sides of the images, {height} × {width} pixels, got {self.patch}"
            )
        smallest = min(height, width) // self.patch
        if smallest < 2 ** (len(self.channels) - 1):
            raise ConfigError(
                f"resnet.channels: {len(self.channels)} stages, each but the first of which halves the image, "
                f"leave nothing of {height} × {width} pixels with resnet.patch {self.patch}"
            )
        num_inputs = math.prod(channels) * self.patch**2
        return ResidualNetwork(self, num_inputs, num_classes, precision=precision, rngs=rngs)

    def largest_patches(self, shape: tuple[int, ...]) -> int:
        """Return the number of scalars in one example's patches of the convolution that has the most."""
        height, width = (side // self.patch for side in shape[:2])
        largest = 9 * self.patch**2 * math.prod(shape[2:]) * height * width
        for stage, count in enumerate(self.channels):
            largest = max(largest, 9 * count * (height >> stage) * (width >> stage))
        return largest


class ResidualBlock(nnx.Module):
    """Twice normalization, activation and convolution of 3 × 3, added to the inputs.

    For another number of channels the inputs are projected, after the first activation. The second convolution starts
    at 0, so that at first a block is its shortcut (P. Goyal et al., arXiv 1706.02677, section 5.1).
    """

    def __init__(self, resnet: ResNet, num_inputs: int, num_outputs: int, *, precision: Precision, rngs: nnx.Rngs):
        self.norms = nnx.List([GroupNorm(num_inputs, resnet.groups), GroupNorm(num_outputs, resnet.groups)])
        widths = itertools.pairwise([num_inputs, num_outputs, num_outputs])
        self.convolutions = nnx.List(Convolution(3, *pair, precision, rngs=rngs) for pair in widths)
        self.convolutions[1].kernel = nnx.Param(jnp.zeros((3, 3, num_outputs, num_outputs)))
        projection: Convolution | None = None
        if num_inputs != num_outputs:
            projection = Convolution(1, num_inputs, num_outputs, precision, rngs=rngs)
        self.projection = projection
        self.activation = resnet.activation

    def __call__(self, inputs: Float[Array, "channels height width batch"], tap: Tap) -> Array:
        outputs = shortcut = inputs
        for index, (norm, convolution) in enumerate(zip(self.norms, self.convolutions, strict=True)):
            outputs = activate(tap(norm, outputs), self.activation)
            if index == 0 and self.projection is not None:
                shortcut = tap(self.projection, outputs)
            outputs = tap(convolution, outputs)
        return shortcut + outputs


class ResidualNetwork(DenseLayers):
    """A convolution, residual blocks, normalization and activation, the mean over all pixels, and a dense layer."""

    def __init__(self, resnet: ResNet, num_inputs: int, num_classes: int, *, precision: Precision, rngs: nnx.Rngs):
        first, last = resnet.channels[0], resnet.channels[-1]
        self.patch = resnet.patch
        self.stem = Convolution(3, num_inputs, first, precision, rngs=rngs)
        widths = [first, *(count for count in resnet.channels for _ in range(resnet.blocks))]
        self.blocks = nnx.List(
            ResidualBlock(resnet, *pair, precision=precision, rngs=rngs) for pair in itertools.pairwise(widths)
        )
        self.blocks_of_stage = resnet.blocks
        self.norm = GroupNorm(last, resnet.groups)
        super().__init__([last, num_classes], resnet.activation, resnet.dropout, precision=precision, rngs=rngs)

    def __call__(
        self, inputs: Float[Array, "batch height width *channels"], key: Key[Array, " batch"] | None, tap: Tap
    ) -> Array:
        activations = tap(self.stem, space_to_depth(batch_last(inputs), self.patch))
        for index, block in enumerate(self.blocks):
            if index and index % self.blocks_of_stage == 0:
                activations = max_pool(activations)
            activations = apply_block(block, activations, tap, remat=self.remat)
        features = jnp.mean(activate(tap(self.norm, activations), self.activation), axis=(1, 2)).T
        return self.classify(dropout(features, self.dropout, folded(key, len(self.layers))), key, tap)
