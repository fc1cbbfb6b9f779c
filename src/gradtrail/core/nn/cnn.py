"""The convolutional network."""

import itertools
import math
from typing import Annotated, ClassVar, Literal

from flax import nnx
from jaxtyping import Array, Float, Key

from gradtrail.core.config import Bounds, ConfigError, Count, Share, config
from gradtrail.core.names import model_name
from gradtrail.core.nn.arithmetic import Precision, max_pool
from gradtrail.core.nn.layers import (
    ActivationKind,
    Convolution,
    GroupNorm,
    LayerNorm,
    Norm,
    Tap,
    activate,
    apply_block,
    batch_last,
    dropout,
    folded,
)
from gradtrail.core.nn.mlp import MAX_LAYERS, DenseLayers, Width

NormKind = Literal["none", "group", "layer"]
_MONOTONE = {"relu", "tanh"}  # activations that increase, or stay
_MAX_KERNEL = 31  # pixels; the program copies the image once per pixel of the kernel


@config
class CNN:
    """Stacks of convolution, normalization and activation, each ended by max pooling of 2 × 2; then dense layers."""

    kind: ClassVar = "cnn"
    channels: tuple[Width, ...]  # channels of each stack, from the input on
    convolutions: Count  # number of convolutions in each stack
    kernel_size: Annotated[int, Bounds(at_least=1, at_most=_MAX_KERNEL)]  # side of each kernel in pixels, odd
    norm: NormKind  # normalization after each convolution
    groups: Count  # number of channel groups, for `norm: group`
    hidden: tuple[Width, ...]  # width of each hidden dense layer
    activation: ActivationKind  # activation of convolutions and hidden dense layers
    dropout: Share  # probability with which a training step sets an input of a dense layer to zero

    def check(self) -> None:
        Bounds(at_least=1).check("channels: number of stacks", len(self.channels))
        num_layers = len(self.channels) * self.convolutions + len(self.hidden)
        Bounds(at_most=MAX_LAYERS).check("channels, convolutions and hidden: number of layers", num_layers)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {self.kernel_size}")
        if self.norm == "group" and any(count % self.groups for count in self.channels):
            raise ValueError(f"groups must divide every one of channels {list(self.channels)}, got {self.groups}")

    @property
    def name(self) -> str:
        return model_name(self.kind, channels=self.channels, hidden=self.hidden)

    def build(
        self, shape: tuple[int, ...], num_classes: int, *, precision: Precision, rngs: nnx.Rngs
    ) -> "ConvolutionalNetwork":
        """Return the network for images of this shape; raise ConfigError if pooling leaves no pixel of them."""
        height, width = (side // 2 ** len(self.channels) for side in shape[:2])
        if not height * width:
            raise ConfigError(
                f"cnn.channels: {len(self.channels)} stacks, each of which halves the image, "
                f"leave nothing of {shape[0]} × {shape[1]} pixels"
            )
        widths = [self.channels[-1] * height * width, *self.hidden, num_classes]
        num_inputs = math.prod(shape[2:])  # channels of the image, 1 if it is grayscale
        return ConvolutionalNetwork(self, num_inputs, widths, precision=precision, rngs=rngs)

    def largest_patches(self, shape: tuple[int, ...]) -> int:
        """Return the number of scalars in one example's patches of the convolution that has the most."""
        largest, num_inputs, (height, width) = 0, math.prod(shape[2:]), shape[:2]
        for num_outputs in self.channels:
            widest = num_inputs if self.convolutions == 1 else max(num_inputs, num_outputs)
            largest = max(largest, self.kernel_size**2 * widest * height * width)
            num_inputs, height, width = num_outputs, height // 2, width // 2
        return largest


class Block(nnx.Module):
    """A convolution, its normalization, and the activation; at the end of a stack, max pooling after that."""

    def __init__(
        self, cnn: CNN, num_inputs: int, num_outputs: int, *, pools: bool, precision: Precision, rngs: nnx.Rngs
    ):
        self.convolution = Convolution(cnn.kernel_size, num_inputs, num_outputs, precision, rngs=rngs)
        norm: Norm | None = None
        if cnn.norm != "none":
            norm = GroupNorm(num_outputs, cnn.groups) if cnn.norm == "group" else LayerNorm(num_outputs)
        self.norm = norm
        self.activation = cnn.activation
        self.pools = pools

    def __call__(self, inputs: Float[Array, "channels height width batch"], tap: Tap) -> Array:
        outputs = tap(self.convolution, inputs)
        if self.norm is not None:
            outputs = tap(self.norm, outputs)
        if not self.pools:
            return activate(outputs, self.activation)
        if self.activation in _MONOTONE:  # after pooling, which it commutes with, it has a quarter of the work
            return activate(max_pool(outputs), self.activation)
        return max_pool(activate(outputs, self.activation))


class ConvolutionalNetwork(DenseLayers):
    """Stacks of convolutions, then dense layers of these widths."""

    def __init__(self, cnn: CNN, num_inputs: int, widths: list[int], *, precision: Precision, rngs: nnx.Rngs):
        channels = [num_inputs, *(count for count in cnn.channels for _ in range(cnn.convolutions))]
        self.blocks = nnx.List(
            Block(cnn, *pair, pools=index % cnn.convolutions == 0, precision=precision, rngs=rngs)
            for index, pair in enumerate(itertools.pairwise(channels), start=1)
        )
        super().__init__(widths, cnn.activation, cnn.dropout, precision=precision, rngs=rngs)

    def __call__(
        self, inputs: Float[Array, "batch height width *channels"], key: Key[Array, " batch"] | None, tap: Tap
    ) -> Array:
        activations = batch_last(inputs)
        for block in self.blocks:
            activations = apply_block(block, activations, tap, remat=self.remat)
        features = activations.reshape(-1, inputs.shape[0]).T
        return self.classify(dropout(features, self.dropout, folded(key, len(self.layers))), key, tap)
