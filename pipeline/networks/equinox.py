"""A perceptron in Equinox, whose parameters are the arrays of its module, by path."""

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from flax import nnx

from gradtrail.core.config import Count, config


@config
class Network:
    """The keys of `train.own`, beside `file`."""

    width: Count  # of each hidden layer
    depth: Count  # number of hidden layers

    def build(self, shape: tuple[int, ...], num_classes: int, *, rngs: nnx.Rngs) -> Any:
        make = functools.partial(eqx.nn.MLP, math.prod(shape), num_classes, self.width, self.depth)
        return Adapter(lambda key: make(key=key))


class Adapter:
    def __init__(self, make: Callable[[jax.Array], Callable]):
        self.make = make

    def init(self, key: jax.Array) -> Any:
        arrays = eqx.filter(self.make(key), eqx.is_array)
        return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(arrays)}

    def apply(self, params: Any, images: jax.Array) -> jax.Array:
        template = eqx.filter_eval_shape(self.make, jax.random.key(0))
        model = jax.tree.map_with_path(lambda path, leaf: params.get(path_name(path), leaf), template)
        return jax.vmap(lambda image: model(image.ravel()))(images)


def path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
