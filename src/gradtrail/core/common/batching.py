"""Batches as index arrays, padded and masked: every example is in exactly one batch, and all batches have one shape."""

import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt8

PADDING = -1


def num_batches(num_examples: int, batch_size: int) -> int:
    """Return the number of batches for all examples; the last one may be padded."""
    return math.ceil(num_examples / batch_size)


def shuffled_batches(num_examples: int, batch_size: int, *, key: Key[Array, ""]) -> Int[Array, "steps batch"]:
    """Draw the order of the examples in one epoch.

    Args:
        num_examples: size of the data set; static under `jit`.
        batch_size: static under `jit`.
        key: determines the order.

    Returns:
        int32 indices into the data set, each once; the last batch is filled up with `PADDING`, -1.
    """
    order = jax.random.permutation(key, num_examples).astype(jnp.int32)
    steps = num_batches(num_examples, batch_size)
    padded = jnp.pad(order, (0, steps * batch_size - num_examples), constant_values=PADDING)
    return padded.reshape(steps, batch_size)


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

    Args:
        function: arrays of `batch_size` rows each → dict of arrays with as many rows.
        batch_size: the last batch is filled up with copies of its first row, whose results are dropped.
        arrays: of equal length.

    Yields:
        The results of each batch, without those of the filling.
    """
    for start in range(0, len(arrays[0]), batch_size):
        parts = [array[start : start + batch_size] for array in arrays]
        count = len(parts[0])
        filled = [np.concatenate([part, np.repeat(part[:1], batch_size - count, axis=0)]) for part in parts]
        yield {name: np.asarray(rows)[:count] for name, rows in function(*filled).items()}


def join(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate what `map_batches` yields, name by name."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
