"""The bound of clipped gradients at the inputs and cotangents where gradients cancel most, as gradient ascent finds."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import PyTree

from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.layers import ROUNDING, Convolution, Dense, GroupNorm, Layer, LayerNorm

NUM_EXAMPLES = 16
RNGS = nnx.Rngs(0)
LAYERS: dict[str, tuple[Callable[[Precision], Layer], tuple[int, ...], tuple[int, ...]]] = {
    "dense": (lambda precision: Dense(20, 6, precision, rngs=RNGS), (20,), (6,)),
    "convolution": (lambda precision: Convolution(3, 8, 16, precision, rngs=RNGS), (8, 3, 3), (16, 3, 3)),
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


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_no_gradient_exceeds_its_bound(name: str, copies: int) -> None:
    make, *shapes = LAYERS[name]
    result = most_cancelled(make("float32"), tuple(shapes), copies)
    for precision, dtype in itertools.product(PRIVATE_PRECISIONS, PRIVATE_PRECISIONS):
        layer = make(precision)
        inputs, cotangent = (jnp.asarray(value, dtype).astype(jnp.float32) for value in result)

        @jax.jit
        def added(inputs: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, PyTree]:
            squared, terms = layer.clip_terms(inputs, cotangent, copies)  # noqa: B023
            weights = jnp.diag(1 / jnp.sqrt(squared))  # of each example by itself
            return jax.vmap(lambda row: layer.weighted_grad(terms, row))(weights)  # noqa: B023

        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(added(inputs, cotangent))]
        norms = np.sqrt(sum(np.sum(leaf.reshape(NUM_EXAMPLES, -1) ** 2, axis=1) for leaf in leaves))
        assert norms.max() <= 1 + 16 * ROUNDING
