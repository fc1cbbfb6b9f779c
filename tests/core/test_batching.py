"""Every example is in exactly one batch; padding counts for nothing."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrail.core import batching

# In one program: each operation by itself would be compiled for each new size
shuffled_batches = jax.jit(batching.shuffled_batches, static_argnums=(0, 1), static_argnames=("window", "block"))
SIZES = st.tuples(st.integers(1, 40), st.integers(1, 50))


@settings(max_examples=4)  # each new size is compiled
@given(SIZES, st.integers(0, 3))
def test_an_epoch_visits_every_example_once(sizes: tuple[int, int], seed: int) -> None:
    num_examples, batch_size = sizes
    order = np.asarray(shuffled_batches(num_examples, batch_size, key=jax.random.key(seed)))
    assert order.shape == (batching.num_batches(num_examples, batch_size), batch_size)
    assert order.dtype == np.int32
    visited = order.ravel()
    np.testing.assert_array_equal(np.sort(visited[:num_examples]), np.arange(num_examples))
    assert np.all(visited[num_examples:] == batching.PADDING)
    assert np.all(np.any(order != batching.PADDING, axis=1)), "no batch is padding alone"


@settings(max_examples=3)  # each new size is compiled
@given(st.integers(20, 60), st.sampled_from([(4, 1), (6, 2), (6, 3), (8, 8)]), st.integers(0, 3))
def test_in_windows_every_example_comes_once_and_blocks_stay_in_one_or_two_windows(
    num_examples: int, sizes: tuple[int, int], seed: int
) -> None:
    window, block = sizes
    result = shuffled_batches(num_examples, 5, key=jax.random.key(seed), window=window, block=block)
    order = np.asarray(result).ravel()
    visited, padding = order[:num_examples], order[num_examples:]
    np.testing.assert_array_equal(np.sort(visited), np.arange(num_examples))
    assert np.all(padding == batching.PADDING)
    if num_examples > window:
        for number in range(-(-num_examples // block)):
            windows = {place // window for place in np.flatnonzero(visited // block == number).tolist()}
            assert max(windows) - min(windows) <= 1


@pytest.mark.slow
@settings(max_examples=6)  # each new size is compiled
@given(st.integers(1, 60), st.integers(1, 25), st.sampled_from([(4, 1), (6, 3), (8, 8)]), st.integers(0, 3))
def test_order_in_parts_equals_the_whole_epoch(
    num_examples: int, batch_size: int, sizes: tuple[int, int], seed: int
) -> None:
    window, block = sizes
    options: Any = {"key": jax.random.key(seed), "window": window, "block": block}
    drawn: list[int] = []

    def draw(index: np.int32) -> jax.Array:
        drawn.append(int(index))
        return batching.shuffled_window(num_examples, jnp.int32(index), **options)

    order = batching.Order(num_examples, batch_size, draw, window=window)
    parts = [order.batches(start, min(start + 2, order.num_steps)) for start in range(0, order.num_steps, 2)]
    whole = np.asarray(shuffled_batches(num_examples, batch_size, **options))
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert drawn == [*range(batching.num_batches(num_examples, window))]
    beyond = order.batches(0, order.num_steps + 1)
    assert np.all(beyond[-1] == batching.PADDING), "after the last step there is padding"


def test_windows_change_with_the_epoch() -> None:
    orders = [
        np.asarray(shuffled_batches(64, 8, key=jax.random.key(epoch), window=16, block=4)).reshape(4, 16)
        for epoch in range(2)
    ]
    assert [set(window.tolist()) for window in orders[0]] != [set(window.tolist()) for window in orders[1]]
    assert all(np.any(np.diff(window) < 0) for window in orders[0]), "blocks are mixed"


def test_a_split_of_one_window_is_in_the_order_of_a_plain_permutation() -> None:
    key = jax.random.key(3)
    result = shuffled_batches(16, 4, key=key, window=16, block=4)
    np.testing.assert_array_equal(np.asarray(result).ravel(), jax.random.permutation(key, 16))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_values_have_no_effect_even_if_not_finite(poison: float) -> None:
    values, mask = np.array([1.0, poison, 3.0], np.float32), np.array([True, False, True])
    total, grads = jax.jit(jax.value_and_grad(batching.masked_sum))(values, mask)
    assert total == 4
    np.testing.assert_array_equal(grads, [1, 0, 1])


@given(SIZES)
def test_map_batches_equals_the_unbatched_call(sizes: tuple[int, int]) -> None:
    num_examples, batch_size = sizes
    left = np.arange(num_examples, dtype=np.int32)
    right = np.arange(num_examples * 2, dtype=np.float32).reshape(num_examples, 2)

    def function(left: np.ndarray, right: np.ndarray) -> dict[str, np.ndarray]:
        assert len(left) == len(right) == batch_size, "one shape of batch"
        return {"sum": left + right.sum(axis=1), "right": right}

    parts = list(batching.map_batches(function, batch_size, left, right))
    joined = batching.join(parts)
    np.testing.assert_array_equal(joined["sum"], left + right.sum(axis=1))
    np.testing.assert_array_equal(joined["right"], right)
    assert len(parts) == batching.num_batches(num_examples, batch_size)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_item_is_yielded_after_the_next_was_dispatched(count: int) -> None:
    started: list[int] = []

    def start_each() -> Iterator[int]:
        for number in range(count):
            started.append(number)
            yield number

    observed = [(number, len(started)) for number in batching.overlapped(start_each())]
    assert observed == [(number, min(number + 2, count)) for number in range(count)]
