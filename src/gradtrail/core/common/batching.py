"""Batches as index arrays, padded and masked: every example is in exactly one batch, and all batches have one shape.

An epoch visits the examples window by window, so that a split that memory does not hold is read in long pieces. One
of at most a window is shuffled as a whole.
"""

import collections
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt8

Started = TypeVar("Started")

PADDING = -1
WINDOW = 2**17  # examples that are shuffled among each other: 100 MB of 28 x 28 pixels
BLOCK = 2**12  # consecutive examples that come into the same window, or into two neighbouring ones


def num_batches(num_examples: int, batch_size: int) -> int:
    """Return the number of batches for all examples; the last one may be padded."""
    return math.ceil(num_examples / batch_size)


def shuffled_batches(
    num_examples: int, batch_size: int, *, key: Key[Array, ""], window: int = WINDOW, block: int = BLOCK
) -> Int[Array, "steps batch"]:
    """Draw the order of the examples in one epoch: a function of its arguments alone, wherever the examples lie.

    Blocks of consecutive examples are shuffled, the blocks' examples are cut into windows, and each window is shuffled.
    A split of at most one window is in uniformly random order.

    Args:
        num_examples: size of the data set; static under `jit`.
        batch_size: static under `jit`.
        key: determines the order.
        window: examples that are shuffled among each other, a multiple of `block`.
        block: consecutive examples that stay together, but where a window ends; of the last block there may be fewer.

    Returns:
        int32 indices into the data set, each once; the last batch is filled up with `PADDING`, -1.
    """
    if num_examples <= window:
        order = jax.random.permutation(key, num_examples).astype(jnp.int32)
    else:
        of_blocks, of_windows = jax.random.split(key)
        order = _in_windows(_in_blocks(num_examples, block, key=of_blocks), window, key=of_windows)
    steps = num_batches(num_examples, batch_size)
    padded = jnp.pad(order, (0, steps * batch_size - num_examples), constant_values=PADDING)
    return padded.reshape(steps, batch_size)


def _in_blocks(num_examples: int, block: int, *, key: Key[Array, ""]) -> Int[Array, " examples"]:
    """Return all indices, ascending within each block, the blocks in random order."""
    blocks = jax.random.permutation(key, math.ceil(num_examples / block)).astype(jnp.int32)
    order = (blocks[:, None] * block + jnp.arange(block, dtype=jnp.int32)[None]).ravel()
    exists = order < num_examples  # not so at the end of the last block
    places = jnp.where(exists, jnp.cumsum(exists) - 1, num_examples)
    return jnp.zeros(num_examples, jnp.int32).at[places].set(order, mode="drop")


def _in_windows(order: Int[Array, " examples"], window: int, *, key: Key[Array, ""]) -> Int[Array, " examples"]:
    """Return the indices with each window of them shuffled; the last window may be smaller."""
    whole = len(order) // window
    keys = jax.random.split(key, whole + 1)
    shuffled = jax.lax.map(
        lambda of: jax.random.permutation(*of), (keys[:-1], order[: whole * window].reshape(whole, -1))
    )
    return jnp.concatenate([shuffled.ravel(), jax.random.permutation(keys[-1], order[whole * window :])])


def gather(
    arrays: tuple[Shaped[Array, "examples ..."], ...], indices: Int[Array, " batch"]
) -> tuple[tuple[Shaped[Array, "batch ..."], ...], Bool[Array, " batch"]]:
    """Return the rows of each array at `indices`, and a mask that is false where the index is `PADDING`.

    A padded row holds the data of example 0; the caller must apply the mask.
    """
    mask = indices != PADDING
    rows = jnp.where(mask, indices, 0)
    return tuple(array[rows] for array in arrays), mask


def masked_sum(values: Float[Array, " batch"], mask: Bool[Array, " batch"]) -> Float[Array, ""]:
    """Return the sum over the rows where `mask` is true."""
    return jnp.sum(jnp.where(mask, values, 0.0))


def normalize(images: UInt8[Array, "*batch height width"]) -> Float[Array, "*batch height width"]:
    """Scale pixels from 0..255 to float32 in 0..1."""
    return images.astype(jnp.float32) / 255.0


def map_batches(
    function: Callable[..., dict[str, Shaped[Array, "batch ..."]]], batch_size: int, *arrays: np.ndarray
) -> Iterator[dict[str, np.ndarray]]:
    """Apply a function compiled for one batch size to arrays of any length on the host, batch by batch.

    While a batch is computed the next one is made ready, and what came before it copied to the host.

    Args:
        function: arrays of `batch_size` rows each → dict of arrays with as many rows.
        batch_size: the last batch is filled up with copies of its first row, whose results are dropped.
        arrays: of equal length.

    Yields:
        The results of each batch, without those of the filling.
    """

    def start_each() -> Iterator[tuple[dict[str, Shaped[Array, "batch ..."]], int]]:
        for start in range(0, len(arrays[0]), batch_size):
            parts = [array[start : start + batch_size] for array in arrays]
            count = len(parts[0])
            filled = [np.concatenate([part, np.repeat(part[:1], batch_size - count, axis=0)]) for part in parts]
            yield function(*filled), count

    for found, count in one_ahead(start_each()):
        yield {name: np.asarray(rows)[:count] for name, rows in found.items()}


def one_ahead(started: Iterable[Started]) -> Iterator[Started]:
    """Yield what an iterator makes after the one behind it is made: JAX' calls return before they have computed."""
    waiting = collections.deque[Started]()
    for each in started:
        waiting.append(each)
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


def join(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate what `map_batches` yields, name by name."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
