"""Batches as index arrays, padded and masked: every example is in exactly one batch, and all batches have one shape.

An epoch visits the examples window by window, so that a split larger than memory is read in long pieces. A split of
at most one window is shuffled as a whole.
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
WINDOW = 2**17  # examples that are shuffled together: 100 MB of 28 x 28 pixels
BLOCK = 2**12  # consecutive examples that come into the same window, or into two neighbouring ones


def num_batches(num_examples: int, batch_size: int) -> int:
    """Return the number of batches, or of windows, for all examples; the last one may be padded."""
    return math.ceil(num_examples / batch_size)


def shuffled_batches(
    num_examples: int, batch_size: int, *, key: Key[Array, ""], window: int = WINDOW, block: int = BLOCK
) -> Int[Array, "steps batch"]:
    """Draw the order of the examples in one epoch, as a function of the arguments alone.

    Blocks of consecutive examples are shuffled, the blocks' examples are cut into windows, and each window, a multiple
    of a block, is shuffled. A split of at most one window is in uniformly random order.

    The result has int32 indices into the data set, each once; the last batch is filled up with `PADDING`, -1.
    """
    steps = num_batches(num_examples, batch_size)

    def draw(index: Array) -> Array:
        return shuffled_window(num_examples, index, key=key, window=window, block=block)

    if num_examples <= window:
        order = draw(jnp.int32(0))
    else:
        windows = jax.lax.map(draw, jnp.arange(num_batches(num_examples, window), dtype=jnp.int32))
        last = windows[-1][jnp.argsort(windows[-1] == PADDING, stable=True)]
        order = jnp.concatenate([windows[:-1].ravel(), last])[:num_examples]
    padded = jnp.pad(order, (0, steps * batch_size - num_examples), constant_values=PADDING)
    return padded.reshape(steps, batch_size)


def shuffled_window(
    num_examples: int, index: Int[Array, ""], *, key: Key[Array, ""], window: int = WINDOW, block: int = BLOCK
) -> Int[Array, " window"]:
    """Draw one window of the order of `shuffled_batches`, in the last one with `PADDING`, which the caller drops.

    A smaller split has one window of its own size.
    """
    if num_examples <= window:
        return jax.random.permutation(key, num_examples).astype(jnp.int32)
    block_key, window_key = jax.random.split(key)
    places = index * window + jnp.arange(window, dtype=jnp.int32)
    count = math.ceil(num_examples / block)
    blocks = jax.random.permutation(block_key, count).astype(jnp.int32)
    # The last block may be short: places after it are those among whole blocks plus what it lacks
    missing = count * block - num_examples
    end_of_short = (jnp.argmax(blocks == count - 1).astype(jnp.int32) + 1) * block - missing
    in_whole_blocks = jnp.where(places < end_of_short, places, places + missing)
    entries = blocks[in_whole_blocks // block] * block + in_whole_blocks % block
    drawn = jnp.where(places < num_examples, entries, PADDING)
    return jax.random.permutation(jax.random.split(window_key, num_batches(num_examples, window))[index], drawn)


class Order:
    """The order of one epoch on the host; a window is drawn once and cached until a later step is requested."""

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        draw: Callable[[np.int32], Int[Array, " window"]],  # index of a window → `shuffled_window`
        window: int = WINDOW,
    ):
        self.batch_size = batch_size
        self.num_steps = num_batches(num_examples, batch_size)
        self._num_examples = num_examples
        self._window = min(num_examples, window)
        self._draw = draw
        self._drawn: dict[int, np.ndarray] = {}

    def batches(self, start: int, stop: int) -> Int[np.ndarray, "steps batch"]:
        """Return the indices of the steps in [start, stop); rows after the last example are `PADDING`."""
        low, high = start * self.batch_size, stop * self.batch_size
        rows = np.full(high - low, PADDING, np.int32)
        last = min(high, self._num_examples)
        windows = range(low // self._window, -(-last // self._window))
        self._drawn = {number: self._drawn[number] for number in windows if number in self._drawn}
        for number in windows:
            if number not in self._drawn:
                drawn = np.asarray(jax.device_get(self._draw(np.int32(number))))
                self._drawn[number] = drawn[drawn != PADDING]
            first = number * self._window
            begin, end = max(low, first), min(last, first + self._window)
            rows[begin - low : end - low] = self._drawn[number][begin - first : end - first]
        return rows.reshape(stop - start, self.batch_size)


def masked_sum(values: Float[Array, " batch"], mask: Bool[Array, " batch"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(mask, values, 0.0))


def normalize(images: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Scale pixels from 0..255 to float32 in 0..1."""
    return images.astype(jnp.float32) / 255.0


def map_batches(
    function: Callable[..., dict[str, Shaped[Array, "batch ..."]]], batch_size: int, *arrays: np.ndarray
) -> Iterator[dict[str, np.ndarray]]:
    """Apply a function compiled for `batch_size` rows to host arrays of any length, and yield its results by batch.

    The last batch is padded with copies of its first row, whose results are dropped. While a batch is computed, the
    next one is prepared and the one before is copied to the host.
    """

    def dispatch() -> Iterator[tuple[dict[str, Shaped[Array, "batch ..."]], int]]:
        for start in range(0, len(arrays[0]), batch_size):
            parts = [array[start : start + batch_size] for array in arrays]
            count = len(parts[0])
            filled = [np.concatenate([part, np.repeat(part[:1], batch_size - count, axis=0)]) for part in parts]
            yield jax.copy_to_host_async(function(*filled)), count

    for results, count in overlapped(dispatch()):
        yield {name: np.asarray(rows)[:count] for name, rows in results.items()}


def overlapped(started: Iterable[Started]) -> Iterator[Started]:
    """Yield item i once item i + 1 was dispatched, so that the host copies while the device computes."""
    waiting = collections.deque[Started]()
    for item in started:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


def join(batches: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate the results of `map_batches` by name."""
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
