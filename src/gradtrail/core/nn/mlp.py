"""Networks of dense layers: softmax regression and the multilayer perceptron."""

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from gradtrail.core.config import Bounds, Share, config
from gradtrail.core.names import model_name
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.layers import ActivationKind, Dense, Tap, activate, dropout, folded

MAX_LAYERS = 256  # more would compile for minutes
Width = Annotated[int, Bounds(at_least=1, at_most=2**24)]  # XLA counts the bytes of a layer's weights in int64


class DenseLayers(nnx.Module):
    """Dense layers with an activation between them: a whole perceptron, or the end of a convolutional network."""

    def __init__(
        self,
        widths: Sequence[int],
        activation: ActivationKind = "relu",
        dropout: float = 0.0,
        *,
        precision: Precision,
        rngs: nnx.Rngs,
    ):
        self.layers = nnx.List(Dense(*pair, precision, rngs=rngs) for pair in itertools.pairwise(widths))
        self.activation = activation
        self.dropout = dropout
        self.remat = False  # True if the backward pass recomputes activations, which convolutional blocks alone do

    def classify(self, features: Float[Array, "batch features"], key: Key[Array, " batch"] | None, tap: Tap) -> Array:
        """Return the logits; `key` is for dropout of hidden units."""
        for index, layer in enumerate(self.layers[:-1]):
            features = dropout(activate(tap(layer, features), self.activation), self.dropout, folded(key, index))
        return tap(self.layers[-1], features)


class Perceptron(DenseLayers):
    """Dense layers on the pixels of images, or on features of them."""

    def __call__(self, inputs: Float[Array, "batch ..."], key: Key[Array, " batch"] | None, tap: Tap) -> Array:
        return self.classify(jnp.reshape(inputs, (inputs.shape[0], -1)), key, tap)


@config
class Linear:
    """Softmax regression."""

    kind: ClassVar = "linear"
    dropout: ClassVar = 0.0
    name: ClassVar = "linear"

    def build(self, shape: tuple[int, ...], num_classes: int, *, precision: Precision, rngs: nnx.Rngs) -> Perceptron:
        return Perceptron([math.prod(shape), num_classes], precision=precision, rngs=rngs)


@config
class MLP:
    """A multilayer perceptron."""

    kind: ClassVar = "mlp"
    hidden: tuple[Width, ...]  # width of each hidden layer, from the input on
    # a bounded one loses less to private clipping (Papernot et al., arXiv 2007.14191)
    activation: ActivationKind
    dropout: Share  # probability that a training step sets a hidden unit to zero

    def check(self) -> None:
        Bounds(at_least=1, at_most=MAX_LAYERS).check("hidden: number of layers", len(self.hidden))

    @property
    def name(self) -> str:
        return model_name(self.kind, hidden=self.hidden)

    def build(self, shape: tuple[int, ...], num_classes: int, *, precision: Precision, rngs: nnx.Rngs) -> Perceptron:
        widths = [math.prod(shape), *self.hidden, num_classes]
        return Perceptron(widths, self.activation, self.dropout, precision=precision, rngs=rngs)
