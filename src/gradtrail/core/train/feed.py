"""Feeds a training: the split on the device, or blocks of the next steps' examples.

A large split, whose columns may be memory maps, comes in blocks: one thread gathers the rows of the next steps while
the device computes. The windows of the order (see `batching`) keep these rows close together on disk. Blocks are global
arrays over the mesh: a process gathers the rows of its own devices only.
"""

import collections
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from gradtrail.core.common.batching import Order
from gradtrail.core.common.sharding import over_batch
from gradtrail.core.common.split import Split
from gradtrail.core.train.batch_gradient import Examples

_ROWS = 2**15  # rows of a block: 26 MB of 28 x 28 pixels
_AHEAD = 2  # blocks that are gathered ahead while one is computed


@dataclass(frozen=True, kw_only=True)
class Block:
    """Examples of the steps in [first, stop) of an epoch."""

    first: int
    stop: int
    examples: Examples
    # int32 indices of these steps in a block; of all steps of the epoch if `examples` is the split
    order: Int[Array | np.ndarray, "steps batch"]


def steps_in_block(batch_size: int, steps_per_epoch: int) -> int:
    """Return the number of steps of a block; the last block of an epoch may have fewer."""
    return min(steps_per_epoch, max(1, _ROWS // batch_size))


def positions(step: Int[Array, ""], batch_size: int, steps_per_block: int, num_shards: int) -> Int[Array, " batch"]:
    """Return the positions of a step's rows in each shard's part of a block, int32."""
    rows_per_shard = batch_size // num_shards
    return step % steps_per_block * rows_per_shard + jax.numpy.arange(batch_size, dtype=np.int32) % rows_per_shard


def unread_bytes(examples: Any, rows: int) -> int:
    """Return the bytes of the examples on a device that a step does not gather, if XLA's cost analysis counts them.

    Args:
        examples: `Examples` of abstract arrays with shardings.
        rows: number of examples that a step gathers on a device.
    """
    if jax.default_backend() != "cpu":
        return 0
    shapes = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(examples)]
    return sum(max(0, size - rows) * math.prod(shape) * itemsize for (size, *shape), itemsize in shapes)


def blocks(split: Split, order: Order, mesh: Mesh, *, steps_per_block: int, first: int) -> Iterator[Block]:
    """Yield the blocks of an epoch, starting with the one that contains step `first`; all have one shape.

    Each shard of a block's arrays has the rows of its part of each batch, batch after batch, in the order of the steps,
    at `positions`. Padding has the data of example 0, as in `batching.gather`.
    """

    def gather(batches: Int[np.ndarray, "steps batch"]) -> Examples:
        by_shard = batches.reshape(len(batches), mesh.size, -1).swapaxes(0, 1).reshape(mesh.size, -1)
        rows = np.maximum(by_shard, 0)

        def on_devices(column: np.ndarray) -> Array:
            def of_shard(index: Any) -> np.ndarray:
                return column.take(rows[(index[0].start or 0) // rows.shape[1]], axis=0)

            return jax.make_array_from_callback((batches.size, *column.shape[1:]), over_batch(mesh), of_shard)

        return Examples(images=on_devices(split.images), labels=on_devices(split.labels))

    waiting: collections.deque[tuple[int, np.ndarray, Future[Examples]]] = collections.deque()

    def next_block() -> Block:
        start, batches, examples = waiting.popleft()
        stop = min(start + steps_per_block, order.num_steps)
        return Block(first=start, stop=stop, examples=examples.result(), order=batches)

    with ThreadPoolExecutor(1, thread_name_prefix="feed") as pool:
        for start in range(first - first % steps_per_block, order.num_steps, steps_per_block):
            batches = order.batches(start, start + steps_per_block)
            waiting.append((start, batches, pool.submit(gather, batches)))
            if len(waiting) > _AHEAD:
                yield next_block()
        while waiting:
            yield next_block()
