"""The network is an object that holds its parameters; transformations of NNX update it in place."""

import itertools
from typing import Any

import jax
import optax
from flax import nnx

WIDTHS = (784, 256, 128, 10)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(nnx.Linear(*shape, rngs=rngs) for shape in itertools.pairwise(WIDTHS))

    def __call__(self, images: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            images = nnx.relu(layer(images))
        return last(images)


def init(key: jax.Array) -> MLP:
    return MLP(nnx.Rngs(params=key))


def start(model: MLP) -> Any:
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def loss_fn(model: MLP, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
    model, optimizer = state
    loss, grads = nnx.value_and_grad(loss_fn)(model, images, labels)
    optimizer.update(model, grads)
    return state, loss


@nnx.jit
def train_epoch(state: Any, images: jax.Array, labels: jax.Array) -> Any:
    scan = nnx.scan(train_step, in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
    return scan(state, images, labels)
