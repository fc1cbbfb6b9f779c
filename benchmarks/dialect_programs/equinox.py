"""The network is a pytree with methods, for one example; functions return a changed copy."""

import itertools
from typing import Any

import equinox as eqx
import jax
import optax

WIDTHS = (784, 256, 128, 10)

optimizer = optax.adamw(1e-3)


class MLP(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __init__(self, key: jax.Array) -> None:
        shapes = list(itertools.pairwise(WIDTHS))
        keys = jax.random.split(key, len(shapes))
        self.layers = [eqx.nn.Linear(*shape, key=key) for key, shape in zip(keys, shapes, strict=True)]

    def __call__(self, image: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            image = jax.nn.relu(layer(image))
        return last(image)


def init(key: jax.Array) -> MLP:
    return MLP(key)


def start(model: MLP) -> Any:
    return model, optimizer.init(eqx.filter(model, eqx.is_array))


def loss_fn(model: MLP, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def train_step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
    model, opt_state = state
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, images, labels)
    updates, opt_state = optimizer.update(grads, opt_state, model)
    return (eqx.apply_updates(model, updates), opt_state), loss


@eqx.filter_jit
def train_epoch(state: Any, images: jax.Array, labels: jax.Array) -> Any:
    return jax.lax.scan(lambda state, batch: train_step(state, *batch), state, (images, labels))
