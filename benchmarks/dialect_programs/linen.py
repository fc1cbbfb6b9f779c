"""The network is a description; `init` makes its parameters, and `apply` takes them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

WIDTHS = (784, 256, 128, 10)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        for width in WIDTHS[1:-1]:
            images = nn.relu(nn.Dense(width)(images))
        return nn.Dense(WIDTHS[-1])(images)


def init(key: jax.Array) -> Any:
    return MLP().init(key, jnp.zeros((1, WIDTHS[0])))


def start(params: Any) -> TrainState:
    return TrainState.create(apply_fn=MLP().apply, params=params, tx=optax.adamw(1e-3))


@jax.jit
def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def train_epoch(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
    return jax.lax.scan(lambda state, batch: train_step(state, *batch), state, (images, labels))
