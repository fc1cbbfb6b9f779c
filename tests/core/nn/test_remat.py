"""What is computed again is the same, is computed, and in between nothing of it is kept."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import new_compiler

from gradtrail.core.nn.remat import rematerialized
from gradtrail.core.xla.compiler import CompiledFunction

WIDTH, BATCH, LAYERS = 16, 256, 5
RNG = np.random.default_rng(0)
PARAMS = {"kernel": RNG.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32), "bias": np.full(WIDTH, 0.1, np.float32)}
INPUTS = RNG.normal(size=(BATCH, WIDTH)).astype(np.float32)


def block(params: dict, inputs: jax.Array) -> jax.Array:
    hidden = jnp.tanh(inputs @ params["kernel"] + params["bias"][None])
    return jnp.tanh(hidden @ params["kernel"]) + inputs


def loss(wrap: Callable, params: dict, inputs: jax.Array) -> jax.Array:
    for _ in range(LAYERS):
        inputs = wrap(block)(params, inputs)
    return jnp.mean(inputs**2)


def gradient(wrap: Callable) -> Callable:
    return jax.value_and_grad(functools.partial(loss, wrap), argnums=(0, 1))


def plain(function: Callable) -> Callable:
    return function


@functools.cache
def compiled(wrap: Callable) -> CompiledFunction:
    return new_compiler().compile("gradient", gradient(wrap), PARAMS, INPUTS)


def test_values_and_gradients_are_the_same() -> None:
    ours, expected = (compiled(wrap)(PARAMS, INPUTS) for wrap in (rematerialized, plain))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), ours, expected)


def test_every_activation_is_computed_twice() -> None:
    ours, once = compiled(rematerialized).cost, compiled(plain).cost
    assert once.transcendentals == LAYERS * 2 * BATCH * WIDTH
    assert ours.transcendentals == 2 * once.transcendentals
    assert ours.flops == pytest.approx(once.flops * 4 / 3, rel=0.1)


def test_less_memory_is_needed_in_between() -> None:
    assert compiled(rematerialized).cost.temporary_bytes < 0.75 * compiled(plain).cost.temporary_bytes


def test_vmapped_gradients_are_those_of_each_example() -> None:
    def of_one(wrap: Callable, inputs: jax.Array) -> jax.Array:
        return jax.grad(functools.partial(loss, wrap))(PARAMS, inputs[None])["kernel"]

    ours, expected = (
        jax.jit(jax.vmap(functools.partial(of_one, wrap)))(INPUTS[:3]) for wrap in (rematerialized, plain)
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)
