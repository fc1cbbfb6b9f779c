"""Per-class chunk sums of gradients, from which noise scale and class similarity follow.

The sums are on the host, see `chunk_bytes`.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from gradtrail.core import batching
from gradtrail.core.data import Split
from gradtrail.core.gradients.passes import GradientPasses, Pass, masked_batch
from gradtrail.core.nn.models import HostParams, Params, num_parameters

_CHUNKS_PER_CLASS = 10
_PRODUCT_COLUMNS = 2**10  # columns of the summed gradients per product: 100 rows of them fit into a cache
_CHUNK_FLOATS = 2**27  # 512 MiB for the summed gradients of all chunks, if two chunks per class fit into that


@dataclass(frozen=True, kw_only=True)
class ChunkGradients:
    """Gradients of a split, summed over chunks of examples of one class each."""

    sums: Float[np.ndarray, "chunks parameters"]  # flat gradient of each chunk, float32, on the host
    classes: Int[np.ndarray, " chunks"]  # class of each chunk
    sizes: Int[np.ndarray, " chunks"]  # number of examples in each chunk
    chunk_of: Int[np.ndarray, " examples"]  # chunk of each example of the split

    def products(self) -> Float[np.ndarray, "chunks chunks"]:
        """Return the inner products of the chunks' sums, float64, in an order independent of threads, unlike a BLAS."""
        total = np.zeros((len(self.sums), len(self.sums)))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for part in pool.map(self._products_from, range(0, self.sums.shape[1], _PRODUCT_COLUMNS)):
                total += part
        return total + np.triu(total, 1).T

    def _products_from(self, start: int) -> Float[np.ndarray, "chunks chunks"]:
        """Return the upper triangle of the inner products over some of the parameters."""
        part = self.sums[:, start : start + _PRODUCT_COLUMNS].astype(np.float64)
        triangle = np.zeros((len(part), len(part)))
        for row in range(len(part)):
            triangle[row, row:] = np.einsum("jk,k->j", part[row:], part[row])
        return triangle

    def squares(self, grad_norm: Float[np.ndarray, " examples"]) -> Float[np.ndarray, " chunks"]:
        """Return for each chunk the sum of its examples' squared gradient norms, float64."""
        return np.bincount(self.chunk_of, weights=grad_norm.astype(np.float64) ** 2, minlength=len(self.sizes))

    def total(self) -> Float[np.ndarray, " parameters"]:
        """Return the summed gradient of the whole split."""
        return np.asarray(np.sum(self.sums, axis=0))

    def class_gradient(self, label: int) -> Float[np.ndarray, " parameters"]:
        """Return the summed gradient of a class."""
        return np.sum(self.sums[self.classes == label], axis=0)


def chunk_gradients(
    passes: GradientPasses,
    params: Params | HostParams,
    split: Split,
    num_classes: int,
    *,
    advance: Callable[..., object],
) -> ChunkGradients:
    """Sum the gradients of each class over chunks of its examples, see `chunks_per_class`.

    `advance` is called with the number of examples of each chunk.
    """
    per_class = chunks_per_class(num_parameters(params), num_classes)
    sums = np.empty((num_classes * per_class, num_parameters(params)), np.float32)
    classes: list[int] = []
    sizes: list[int] = []
    chunk_of = np.zeros(len(split), np.int64)
    for label in range(num_classes):
        members = np.flatnonzero(split.labels == label)
        if not len(members):
            continue
        parts = np.split(members, range(passes.sums.batch_size, len(members), passes.sums.batch_size))
        if len(parts) < per_class:  # a bootstrap over few chunks would underestimate the spread
            parts = np.array_split(members, min(per_class, len(members)))
        for group in np.array_split(np.arange(len(parts)), min(per_class, len(parts))):
            batches = [parts[part] for part in group]
            _sum_into(sums[len(sizes)], passes.sums, params, split, batches)
            rows = np.concatenate(batches)
            chunk_of[rows] = len(sizes)
            classes.append(label)
            sizes.append(len(rows))
            advance(len(rows))
    return ChunkGradients(sums=sums[: len(sizes)], classes=np.array(classes), sizes=np.array(sizes), chunk_of=chunk_of)


def _sum_into(total: np.ndarray, sums: Pass, params: Any, split: Split, parts: list[np.ndarray]) -> None:
    """Write the summed gradient of batches of rows, flat, added in their order."""
    started = (sums.function(params, masked_batch(sums, split, rows)) for rows in parts)
    for number, (part_sum, _) in enumerate(batching.overlapped(started)):
        flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(part_sum)])
        total[:] = total + flat if number else flat


def chunks_per_class(num_parameters: int, num_classes: int) -> int:
    """Return the number of chunks per class: 10, or as many as fit into 512 MiB, but 2 at least."""
    return int(np.clip(_CHUNK_FLOATS // (num_parameters * num_classes), 2, _CHUNKS_PER_CLASS))


def chunk_bytes(num_parameters: int, num_classes: int) -> int:
    """Return the bytes of `ChunkGradients.sums` on the host; they exceed 512 MiB only with 2 chunks a class."""
    return 4 * num_parameters * num_classes * chunks_per_class(num_parameters, num_classes)
