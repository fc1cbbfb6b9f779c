"""Layers keep to their precision and clip bound, dropout to its rate."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import PyTree

from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.layers import ROUNDING, Convolution, Dense, GroupNorm, Layer, LayerNorm, dropout

RNG = np.random.default_rng(0)
ACTIVATIONS = RNG.normal(1.0, 2.0, (6, 4, 3, 5)).astype(np.float32)  # channels, height, width, batch
FEATURES = RNG.normal(size=(5, 7)).astype(np.float32)


def filled(make: Callable[[], nnx.Module]) -> nnx.Module:
    """Return a layer with parameters of which none is 0; its own initial ones would take long to compile."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape), jnp.float32), state))


@pytest.mark.parametrize("norm", [GroupNorm(6, 2), LayerNorm(6)], ids=["group", "layer"])
def test_norm_starts_as_identity_and_treats_examples_separately(norm: nnx.Module) -> None:
    np.testing.assert_array_equal(norm.scale[...], np.ones(6))
    np.testing.assert_array_equal(norm.bias[...], np.zeros(6))
    other_values, normalize = ACTIVATIONS.copy(), jax.jit(norm.__call__)
    other_values[..., 1:] = 7.0
    result = np.asarray(normalize(other_values))
    np.testing.assert_array_equal(result[..., 0], np.asarray(normalize(ACTIVATIONS))[..., 0])
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
    low, exact = (np.asarray(jax.jit(layer.__call__)(inputs)) for layer in (low_layer, exact_layer))
    assert low.dtype == np.float32
    assert 2**-14 < np.abs(low - exact).max() / np.abs(exact).max() < 2**-7


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    rate, keys = 0.1, jax.random.split(jax.random.key(0), 200)
    result = np.asarray(jax.jit(dropout, static_argnums=1)(np.ones((200, 300), np.float32), rate, keys))
    deviation = np.sqrt(rate * (1 - rate))
    assert np.mean(result == 0) == pytest.approx(rate, abs=5 * deviation / np.sqrt(result.size))
    np.testing.assert_allclose(result[result != 0], 1 / (1 - rate), rtol=1e-6)
    of_each = np.mean(result == 0, axis=1)
    assert np.all(np.abs(of_each - rate) < 5 * deviation / np.sqrt(300)), "each example loses its share"
    assert len(np.unique(result, axis=0)) == 200, "each loses units of its own"


NUM_EXAMPLES = 16
LAYERS: dict[str, tuple[Callable[[Precision], Layer], tuple[int, ...], tuple[int, ...]]] = {
    "dense": (lambda precision: Dense(20, 6, precision, rngs=nnx.Rngs(0)), (20,), (6,)),
    "convolution": (lambda precision: Convolution(3, 8, 16, precision, rngs=nnx.Rngs(0)), (8, 3, 3), (16, 3, 3)),
    "group norm": (lambda _: GroupNorm(6, 2), (6, 4, 4), (6, 4, 4)),
    "layer norm": (lambda _: LayerNorm(6), (6, 4, 4), (6, 4, 4)),
}
PRIVATE_PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


def most_cancelled(layer: Layer, shapes: tuple[tuple[int, ...], ...], copies: int) -> list[np.ndarray]:
    """Inputs and cotangents whose gradients, summed over copies, are smallest for their norms: Adam, in float64."""
    rng = np.random.default_rng(copies)
    rows = NUM_EXAMPLES * copies
    starts = [1 + 0.1 * rng.normal(size=(rows, *shapes[0])), rng.normal(size=(rows, *shapes[1]))]
    graphdef, state = nnx.split(layer)

    def cancellation(values: list[jax.Array], wide: Layer) -> jax.Array:
        inputs, cotangent = (jnp.moveaxis(value, 0, layer.batch_axis) for value in values)
        grads = Layer.grads(wide, inputs, cotangent).reshape(NUM_EXAMPLES, copies, -1).sum(axis=1)
        norms = [jnp.sum(value.reshape(NUM_EXAMPLES, -1) ** 2, axis=1) for value in (grads, *values)]
        return jnp.sum(jnp.log(norms[0] + 1e-30) - jnp.log(norms[1]) - jnp.log(norms[2]))

    with jax.enable_x64(True):

        def ascend(number: jax.Array, carry: tuple) -> tuple:
            values, means, squares = carry
            slopes = jax.grad(cancellation)(values, wide)
            means = [0.9 * mean + 0.1 * slope for mean, slope in zip(means, slopes, strict=True)]
            squares = [0.99 * square + 0.01 * slope**2 for square, slope in zip(squares, slopes, strict=True)]
            step = 0.05 * 0.98**number
            moves = [mean / (jnp.sqrt(square) + 1e-12) for mean, square in zip(means, squares, strict=True)]
            return [value - step * move for value, move in zip(values, moves, strict=True)], means, squares

        wide = nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), state))
        zeros = [np.zeros_like(start) for start in starts]
        result = jax.jit(lambda starts: jax.lax.fori_loop(0, 200, ascend, (starts, zeros, zeros))[0])(starts)
        return [np.moveaxis(np.asarray(value), 0, layer.batch_axis) for value in result]


@pytest.mark.parametrize(("name", "copies"), [("dense", 3), ("convolution", 3), ("group norm", 1), ("layer norm", 3)])
def test_no_gradient_exceeds_its_bound(name: str, copies: int) -> None:
    make, *shapes = LAYERS[name]
    result = most_cancelled(filled(lambda: make("float32")), tuple(shapes), copies)
    for precision in PRIVATE_PRECISIONS:

        @jax.jit
        def added(*arrays: jax.Array) -> PyTree:
            layer = make(precision)  # noqa: B023
            inputs, cotangent = (array.astype(precision).astype(jnp.float32) for array in arrays)  # noqa: B023
            squared, terms = layer.clip_terms(inputs, cotangent, copies)
            weights = jnp.diag(1 / jnp.sqrt(squared))  # of each example by itself
            return jax.vmap(lambda row: layer.weighted_grad(terms, row))(weights)

        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(added(*result))]
        norms = np.sqrt(sum(np.sum(leaf.reshape(NUM_EXAMPLES, -1) ** 2, axis=1) for leaf in leaves))
        assert norms.max() <= 1 + 16 * ROUNDING
