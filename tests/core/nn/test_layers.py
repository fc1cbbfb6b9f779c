"""Layers against those of Flax, which have the channels last, and dropout by what it drops."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gradtrail.core.nn.layers import EPSILON, Convolution, Dense, GroupNorm, LayerNorm, dropout

RNG = np.random.default_rng(0)
ACTIVATIONS = RNG.normal(1.0, 2.0, (6, 4, 3, 5)).astype(np.float32)  # channels, height, width, batch
CHANNELS_LAST = np.ascontiguousarray(np.moveaxis(ACTIVATIONS, (3, 0), (0, 3)))
FEATURES = RNG.normal(size=(5, 7)).astype(np.float32)
SCALE, BIAS = RNG.uniform(0.5, 1.5, 6).astype(np.float32), RNG.normal(size=6).astype(np.float32)
KEYS = jax.random.split(jax.random.key(0), 200)

drop = jax.jit(dropout, static_argnums=1)


def compiled(layer: nnx.Module, inputs: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(layer.__call__)(inputs))


def filled(make: Callable[[], nnx.Module]) -> nnx.Module:
    """Return a layer with parameters of which none is 0; its own initial ones would take long to compile."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape), jnp.float32), state))


def channels_first(outputs: np.ndarray) -> np.ndarray:
    return np.moveaxis(outputs, (0, 3), (3, 0))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (GroupNorm(6, 1), nnx.GroupNorm(6, num_groups=1, epsilon=EPSILON, rngs=nnx.Rngs(0))),
        (GroupNorm(6, 3), nnx.GroupNorm(6, num_groups=3, epsilon=EPSILON, rngs=nnx.Rngs(0))),
        (GroupNorm(6, 6), nnx.GroupNorm(6, num_groups=6, epsilon=EPSILON, rngs=nnx.Rngs(0))),
        (LayerNorm(6), nnx.LayerNorm(6, epsilon=EPSILON, rngs=nnx.Rngs(0))),
    ],
    ids=["one_group", "three_groups", "six_groups", "layer"],
)
def test_norms_equal_those_of_flax(ours: nnx.Module, theirs: nnx.Module) -> None:
    for norm in (ours, theirs):
        norm.scale[...], norm.bias[...] = jnp.asarray(SCALE), jnp.asarray(BIAS)
    expected = channels_first(compiled(theirs, CHANNELS_LAST))
    np.testing.assert_allclose(compiled(ours, ACTIVATIONS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [GroupNorm(6, 2), LayerNorm(6)], ids=["group", "layer"])
def test_norm_starts_as_identity_and_treats_examples_separately(norm: nnx.Module) -> None:
    np.testing.assert_array_equal(norm.scale[...], np.ones(6))
    np.testing.assert_array_equal(norm.bias[...], np.zeros(6))
    other_values = ACTIVATIONS.copy()
    other_values[..., 1:] = 7.0
    result = compiled(norm, other_values)
    np.testing.assert_array_equal(result[..., 0], compiled(norm, ACTIVATIONS)[..., 0])
    np.testing.assert_allclose(result[..., 1:], 0, atol=1e-3, err_msg="what is constant has no deviation")


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(functools.partial(Dense, 7, 4), FEATURES), (functools.partial(Convolution, 3, 6, 4), ACTIVATIONS)],
    ids=["dense", "convolution"],
)
def test_a_layer_rounds_to_its_precision_and_returns_float32(make: functools.partial, inputs: np.ndarray) -> None:
    low_layer = filled(lambda: make("bfloat16", rngs=nnx.Rngs(0)))
    exact_layer = filled(lambda: make("float32", rngs=nnx.Rngs(0)))
    nnx.update(exact_layer, nnx.state(low_layer))
    low, exact = compiled(low_layer, inputs), compiled(exact_layer, inputs)
    assert low.dtype == np.float32
    assert 2**-14 < np.abs(low - exact).max() / np.abs(exact).max() < 2**-7


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_its_share_and_keeps_the_mean(rate: float) -> None:
    result = np.asarray(drop(jnp.ones((200, 300)), rate, KEYS))
    deviation = np.sqrt(rate * (1 - rate))
    assert np.mean(result == 0) == pytest.approx(rate, abs=5 * deviation / np.sqrt(result.size))
    np.testing.assert_allclose(result[result != 0], 1 / (1 - rate), rtol=1e-6)
    of_each = np.mean(result == 0, axis=1)
    assert np.all(np.abs(of_each - rate) < 5 * deviation / np.sqrt(300)), "each example loses its share"
    assert len(np.unique(result, axis=0)) == 200, "each loses units of its own"
