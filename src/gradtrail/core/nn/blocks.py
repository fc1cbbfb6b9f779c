"""Blocks of a convolutional network: convolution, norm, activation, pooling."""

from collections.abc import Callable
from typing import Literal

from flax import nnx
from jaxtyping import Array, Float

from gradtrail.core.nn.convolution import max_pool
from gradtrail.core.nn.layers import ActivationKind, Convolution, GroupNorm, LayerNorm, Tap, activate, identity_tap
from gradtrail.core.nn.remat import rematerialized

NormKind = Literal["none", "group", "layer"]


class Block(nnx.Module):
    """A convolution, its normalization, and the activation; with max pooling at the end of a stack."""

    def __init__(
        self, convolution: Convolution, norm: GroupNorm | LayerNorm | None, activation: ActivationKind, *, pools: bool
    ):
        self.convolution = convolution
        self.norm = norm
        self.activation = activation
        self.pools = pools

    def __call__(self, inputs: Float[Array, "channels height width batch"], tap: Tap) -> Array:
        outputs = tap(self.convolution, inputs)
        if self.norm is not None:
            outputs = tap(self.norm, outputs)
        outputs = max_pool(outputs) if self.pools else outputs
        return activate(outputs, self.activation)  # after pooling, which it commutes with, it has a quarter of the work


def make_norm(kind: NormKind, num_channels: int, groups: int) -> GroupNorm | LayerNorm | None:
    """Return the norm of a block; None for none."""
    if kind == "group":
        return GroupNorm(num_channels, groups)
    return LayerNorm(num_channels) if kind == "layer" else None


def rematerialized_block(block: Block) -> Callable[[Array], Array]:
    """Return the function of a block whose backward pass recomputes its activations."""
    graphdef, state = nnx.split(block)
    function = rematerialized(lambda state, inputs: nnx.merge(graphdef, state)(inputs, identity_tap))
    return lambda inputs: function(state, inputs)
