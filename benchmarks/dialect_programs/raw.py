"""The parameters are a pytree of dicts and lists, and the network is a function of them."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

WIDTHS = (784, 256, 128, 10)

he_normal = jax.nn.initializers.he_normal()
optimizer = optax.adamw(1e-3)


def init(key: jax.Array) -> Any:
    shapes = list(itertools.pairwise(WIDTHS))
    keys = jax.random.split(key, len(shapes))
    return [
        {"kernel": he_normal(key, shape, jnp.float32), "bias": jnp.zeros(shape[1])}
        for key, shape in zip(keys, shapes, strict=True)
    ]


def start(params: Any) -> Any:
    return params, optimizer.init(params)


def apply(params: Any, images: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["kernel"] + layer["bias"])
    return images @ last["kernel"] + last["bias"]


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def train_step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


@jax.jit
def train_epoch(state: Any, images: jax.Array, labels: jax.Array) -> Any:
    return jax.lax.scan(lambda state, batch: train_step(state, *batch), state, (images, labels))
