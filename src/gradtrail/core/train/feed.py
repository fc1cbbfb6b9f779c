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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from gradtrail.core.batching import Order
from gradtrail.core.data import Split
from gradtrail.core.sharding import AXIS, put, replicated
from gradtrail.core.train.gradient import Examples

_BLOCK_SPEC = PartitionSpec(None, AXIS)  # each device has a part of every batch of a block
_ROWS = 2**15  # most rows of a block: 26 MB of 28 x 28 pixels
_BYTES = 2**27  # most bytes of a block's images, if they are of several steps
_AHEAD = 2  # blocks that are gathered ahead while one is computed


@dataclass(frozen=True, kw_only=True)
class Block:
    """Examples of the steps in [first, stop) of an epoch."""

    first: int
    stop: int
    examples: Examples
    # int32 indices of these steps in a block; of all steps of the epoch if `examples` is the split
    order: Int[Array, "steps batch"]


def steps_in_block(batch_size: int, image_shape: tuple[int, ...], steps_per_epoch: int) -> int:
    """Return the number of steps of a block; the last block of an epoch may have fewer."""
    rows = min(_ROWS, _BYTES // math.prod(image_shape))
    return min(steps_per_epoch, max(1, rows // batch_size))


def abstract_examples(leading: tuple[int, ...], image_shape: tuple[int, ...], mesh: Mesh) -> Any:
    """Return the shapes, dtypes and shardings of (examples,) on the devices, or of a block, (steps, batch)."""
    sharding = NamedSharding(mesh, _BLOCK_SPEC if len(leading) == 2 else PartitionSpec())
    images: Any = jax.ShapeDtypeStruct((*leading, *image_shape), np.uint8, sharding=sharding)
    labels: Any = jax.ShapeDtypeStruct(leading, np.int32, sharding=sharding)
    return Examples(images=images, labels=labels)


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

    A block's arrays have a leading axis for the steps; each shard has its part of each batch. Padding has the data of
    example 0.
    """

    def gather(batches: Int[np.ndarray, "steps batch"]) -> Examples:
        rows, sharding = np.maximum(batches, 0), NamedSharding(mesh, _BLOCK_SPEC)

        def on_devices(column: np.ndarray) -> Array:
            def gather_part(index: Any) -> np.ndarray:
                return column.take(rows[index[:2]], axis=0)

            return jax.make_array_from_callback((*rows.shape, *column.shape[1:]), sharding, gather_part)

        return Examples(images=on_devices(split.images), labels=on_devices(split.labels))

    waiting: collections.deque[tuple[int, np.ndarray, Future[Examples]]] = collections.deque()

    def next_block() -> Block:
        start, batches, examples = waiting.popleft()
        stop = min(start + steps_per_block, order.num_steps)
        return Block(first=start, stop=stop, examples=examples.result(), order=put(batches, replicated(mesh)))

    with ThreadPoolExecutor(1, thread_name_prefix="feed") as pool:
        for start in range(first - first % steps_per_block, order.num_steps, steps_per_block):
            batches = order.batches(start, start + steps_per_block)
            waiting.append((start, batches, pool.submit(gather, batches)))
            if len(waiting) > _AHEAD:
                yield next_block()
        while waiting:
            yield next_block()
