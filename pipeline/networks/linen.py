"""A perceptron in Flax Linen, whose parameters are its collection `params`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from gradtrail.core.config import Count, config


@config
class Network:
    """The keys of `train.own`, beside `file`."""

    hidden: tuple[Count, ...]  # width of each hidden layer

    def build(self, shape: tuple[int, ...], num_classes: int, *, rngs: nnx.Rngs) -> Any:
        return Adapter(Perceptron((*self.hidden, num_classes)), shape)


class Adapter:
    def __init__(self, module: nn.Module, shape: tuple[int, ...]):
        self.module = module
        self.shape = shape

    def init(self, key: jax.Array) -> Any:
        return self.module.init(key, jnp.zeros((1, *self.shape)))["params"]

    def apply(self, params: Any, images: jax.Array) -> Any:
        return self.module.apply({"params": params}, images)


class Perceptron(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        features = images.reshape(len(images), -1)
        for width in self.widths[:-1]:
            features = nn.relu(nn.Dense(width)(features))
        return nn.Dense(self.widths[-1])(features)
