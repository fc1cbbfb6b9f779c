"""Feeds a training: the split on the device, or prefetched blocks of the next steps.

A split that is larger than memory is a `Source`. One thread reads its rows in the order of the epoch, ahead of the
computation. Memory holds the windows of the order (see `batching`) of the next steps, the blocks of examples in these
windows, and a few blocks of steps. Blocks are global arrays over the mesh: a process reads the windows and makes the
rows of its own devices only.
"""

import collections
import functools
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt8

from gradtrail.core.batching import BLOCK, PADDING, WINDOW, Order
from gradtrail.core.sharding import AXIS
from gradtrail.core.train.gradient import Examples

_BLOCK_SPEC = PartitionSpec(None, AXIS)  # each device has a part of every batch of a block
_ROWS = 2**15  # rows of a block of steps: 26 MB of 28 x 28 pixels
_AHEAD = 2  # blocks of steps that are read ahead while one is computed


@runtime_checkable
class Source(Protocol):
    """A split that is read in parts."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def read(
        self, start: int, stop: int
    ) -> tuple[UInt8[np.ndarray, "examples height width"], Int[np.ndarray, " examples"]]:
        """Return images and int32 labels of the examples in [start, stop)."""


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


def abstract_examples(
    num_examples: int, image_shape: tuple[int, int], batch_size: int, steps_per_block: int | None, mesh: Mesh
) -> Any:
    """Return the shapes, dtypes and shardings of a split on the devices, or of a block of its batches."""
    sharding = NamedSharding(mesh, _BLOCK_SPEC if steps_per_block else PartitionSpec())
    leading = (steps_per_block, batch_size) if steps_per_block else (num_examples,)
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


def blocks(
    source: Source,
    order: Order,
    mesh: Mesh,
    *,
    steps_per_block: int,
    first: int,
) -> Iterator[Block]:
    """Yield the blocks of an epoch, starting with the one that contains step `first`; all have one shape.

    A block's arrays have a leading axis for the steps; each shard has its part of each batch. Padding has the data of
    example 0, as in `batching.gather`.

    Args:
        mesh: the devices that each batch is split over.
        steps_per_block: number of steps of a block, see `steps_in_block`.
        first: step of the epoch.

    Raises:
        Exceptions of `source`, when the block is requested that needs the failed read.
    """
    reader = _Reader(source, steps_per_block * order.batch_size)
    waiting: collections.deque[tuple[int, np.ndarray, Future[Examples]]] = collections.deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="feed")

    def take() -> Block:
        start, batches, future = waiting.popleft()
        stop = min(start + steps_per_block, order.num_steps)
        return Block(first=start, stop=stop, examples=future.result(), order=batches)

    try:
        for start in range(first - first % steps_per_block, order.num_steps, steps_per_block):
            batches = order.batches(start, start + steps_per_block)
            waiting.append((start, batches, pool.submit(reader.examples, batches, mesh)))
            if len(waiting) > _AHEAD:
                yield take()
        while waiting:
            yield take()
    finally:
        pool.shutdown(cancel_futures=True)


class _Reader:
    """Reads blocks of consecutive examples and caches those of the last call.

    Args:
        num_rows: largest number of rows of a call.
    """

    def __init__(self, source: Source, num_rows: int):
        self._source = source
        padding_image, self._padding_label = source.read(0, 1)
        self._padding_image = padding_image[0]
        windows = -(-num_rows // WINDOW) + 1
        slots = min(-(-len(source) // BLOCK), windows * (WINDOW // BLOCK + 1))
        self._images = np.empty((slots * BLOCK, *self._padding_image.shape), np.uint8)  # takes memory as it is filled
        self._labels = np.empty(slots * BLOCK, np.int32)
        self._slot_of: dict[int, int] = {}

    def examples(self, part: Int[np.ndarray, "steps batch"], mesh: Mesh) -> Examples:
        """Return the examples of a block of steps, as `blocks` describes them."""
        self._load(np.unique(part[part != PADDING] // BLOCK).tolist())
        slots = np.zeros(-(-len(self._source) // BLOCK), np.int64)
        slots[[*self._slot_of]] = [*self._slot_of.values()]
        rows_per_shard = part.shape[1] // mesh.size

        @functools.cache
        def rows_of(shard: int) -> tuple[np.ndarray, np.ndarray]:
            indices = part[:, shard * rows_per_shard : (shard + 1) * rows_per_shard]
            places = np.where(indices == PADDING, 0, slots[indices // BLOCK] * BLOCK + indices % BLOCK)
            images, labels = self._images.take(places, axis=0), self._labels.take(places)
            images[indices == PADDING], labels[indices == PADDING] = self._padding_image, self._padding_label
            return images, labels

        def array(column: int, shape: tuple[int, ...]) -> Array:
            def make(index: Any) -> np.ndarray:
                return rows_of((index[1].start or 0) // rows_per_shard)[column]

            return jax.make_array_from_callback((*part.shape, *shape), NamedSharding(mesh, _BLOCK_SPEC), make)

        return Examples(images=array(0, self._padding_image.shape), labels=array(1, ()))

    def _load(self, needed: list[int]) -> None:
        """Read the needed blocks that are not cached, into the slots of blocks that are no longer needed."""
        for block in self._slot_of.keys() - set(needed):
            del self._slot_of[block]
        free = iter(sorted(set(range(len(self._labels) // BLOCK)) - set(self._slot_of.values())))
        for block in needed:
            if block not in self._slot_of:
                stop = min((block + 1) * BLOCK, len(self._source))
                slot = next(free)
                rows = slice(slot * BLOCK, slot * BLOCK + stop - block * BLOCK)
                self._images[rows], self._labels[rows] = self._source.read(block * BLOCK, stop)
                self._slot_of[block] = slot
