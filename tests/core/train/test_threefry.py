"""Normals: each pair against JAX's own blocks, and all against their distribution function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from gradtrail.core.train import threefry


def words(key: jax.Array, blocks: int) -> np.ndarray:
    """Return both words of the blocks of a key, by JAX."""
    counters = jnp.concatenate([jnp.zeros(blocks, jnp.uint32), jnp.arange(blocks, dtype=jnp.uint32)])
    return np.asarray(threefry_2x32(jax.random.key_data(key), counters)).reshape(2, blocks)


def test_a_pair_of_normals_is_a_point_at_the_distance_and_angle_of_its_block() -> None:
    key = jax.random.key(4)
    result = np.asarray(jax.jit(threefry.normals, static_argnums=1)(key, 100_000), np.float64).reshape(-1, 2)
    left, right = words(key, 50_000).astype(np.float64)
    low = right % 256
    distance = np.sqrt(-2 * np.log(np.minimum(left * 2.0**-32 + (low + 0.5) * 2.0**-40, 1)))
    np.testing.assert_allclose(np.hypot(*result.T), distance, rtol=2e-6, atol=4e-4)  # near 0 of 24 bits, near 1
    near = distance > 0.05
    np.testing.assert_allclose(np.hypot(*result[near].T), distance[near], rtol=1e-5)
    quadrant, within = right // 256 % 4, right // 1024
    angle = ((within + 0.5) / 2**22 - 0.5) * np.pi / 2
    cosine = np.where(quadrant % 2, -np.cos(angle), np.cos(angle))
    even, odd = np.where(quadrant // 2, [np.sin(angle), cosine], [cosine, np.sin(angle)])
    expected = np.stack([even, odd], axis=1) * np.hypot(*result.T)[:, None]
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=3e-7)


@pytest.mark.slow
def test_normals_are_finite_and_normal_to_the_tails() -> None:
    result = np.asarray(threefry.normals(jax.random.key(1), 4_000_000), np.float64)
    assert np.all(np.isfinite(result))
    assert stats.kstest(result, "norm").pvalue > 1e-3
    for limit in (1e-3, 1.0, 3.0, 4.5):
        beyond = np.sum(np.abs(result) > limit)
        assert stats.binomtest(int(beyond), len(result), 2 * stats.norm.sf(limit)).pvalue > 1e-3, limit
    squares = result.reshape(-1, 2) ** 2  # of a pair: independent, so their sum is exponential
    assert stats.kstest(squares.sum(axis=1) / 2, "expon").pvalue > 1e-3
    assert abs(np.corrcoef(squares.T)[0, 1]) < 4 / np.sqrt(len(squares))


def test_normals_are_a_function_of_their_key() -> None:
    draw = jax.jit(threefry.normals, static_argnums=1)
    keys = jax.random.split(jax.random.key(2), 3)
    rows = np.stack([draw(key, 100_000) for key in keys])
    np.testing.assert_array_equal(draw(keys[0], 100_000), rows[0])
    np.testing.assert_array_equal(draw(keys[0], 50), rows[0, :50])
    pairs = [*rows, rows[0, ::-1], np.roll(rows[0], 1), np.roll(rows[0], 2)]
    correlations = np.corrcoef(pairs)[np.triu_indices(len(pairs), 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(100_000)


def test_every_key_gives_normals() -> None:
    """They come through a branch on a word of the key, so that XLA does not compute them again."""
    keys = jax.random.wrap_key_data(np.array([[word, 0] for word in (0, 1, 2**31, 2**32 - 1)], np.uint32))
    assert all(np.all(np.isfinite(jax.jit(threefry.normals, static_argnums=1)(key, 100))) for key in keys)
