"""A perceptron in raw pytrees: the parameters are dicts of arrays, and the network is a function of them."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gradtrail.core.config import Count, config


@config
class Network:
    """The keys of `train.own`, beside `file`."""

    hidden: tuple[Count, ...]  # width of each hidden layer

    def build(self, shape: tuple[int, ...], num_classes: int, *, rngs: nnx.Rngs) -> Any:
        return Perceptron([math.prod(shape), *self.hidden, num_classes])


class Perceptron:
    def __init__(self, widths: list[int]):
        self.shapes = list(itertools.pairwise(widths))

    def init(self, key: jax.Array) -> Any:
        draw = jax.nn.initializers.he_normal()
        keys = jax.random.split(key, len(self.shapes))
        return [
            {"kernel": draw(key, shape, jnp.float32), "bias": jnp.zeros((1, shape[1]))}
            for key, shape in zip(keys, self.shapes, strict=True)
        ]

    def apply(self, params: Any, images: jax.Array) -> jax.Array:
        features = images.reshape(len(images), -1)
        *hidden, last = params
        for layer in hidden:
            features = jax.nn.relu(features @ layer["kernel"] + layer["bias"])
        return features @ last["kernel"] + last["bias"]
