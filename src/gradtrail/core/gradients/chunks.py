"""Per-class chunk sums of gradients, from which noise scale and class similarity follow.

The sums are on the host, see `chunk_bytes`. Nothing here takes a BLAS, whose order of additions depends on threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from gradtrail.core import batching
from gradtrail.core.data import Split
from gradtrail.core.nn.models import HostParams, Params, num_parameters
from gradtrail.core.xla.passes import Pass

_CHUNKS_PER_CLASS = 10
_PRODUCT_COLUMNS = 2**10  # columns of the summed gradients per product: 100 rows of them fit into a cache
_CHUNK_FLOATS = 2**27  # 512 MiB for the summed gradients of all chunks, if two chunks per class fit into that

Classes = Float[np.ndarray, "classes classes"]


@dataclass(frozen=True, kw_only=True)
class ChunkGradients:
    """Gradients of a split, summed over chunks of examples of one class each."""

    sums: Float[np.ndarray, "chunks parameters"]  # flat gradient of each chunk, float32, on the host
    classes: Int[np.ndarray, " chunks"]  # class of each chunk
    sizes: Int[np.ndarray, " chunks"]  # number of examples in each chunk
    chunk_of: Int[np.ndarray, " examples"]  # chunk of each example of the split

    def products(self) -> Float[np.ndarray, "chunks chunks"]:
        """Return the inner products of the chunks' sums, float64."""

        def upper_triangle(start: int) -> np.ndarray:
            part = self.sums[:, start : start + _PRODUCT_COLUMNS].astype(np.float64)
            triangle = np.zeros((len(part), len(part)))
            for row in range(len(part)):
                triangle[row, row:] = np.einsum("jk,k->j", part[row:], part[row])
            return triangle

        total = np.zeros((len(self.sums), len(self.sums)))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for part in pool.map(upper_triangle, range(0, self.sums.shape[1], _PRODUCT_COLUMNS)):
                total += part
        return total + np.triu(total, 1).T

    def squares(self, grad_norm: Float[np.ndarray, " examples"]) -> Float[np.ndarray, " chunks"]:
        """Return for each chunk the sum of its examples' squared gradient norms, float64."""
        return np.bincount(self.chunk_of, weights=grad_norm.astype(np.float64) ** 2, minlength=len(self.sizes))


def chunk_gradients(
    sums: Pass, params: Params | HostParams, split: Split, num_classes: int, *, advance: Callable[..., object]
) -> tuple[ChunkGradients, dict[str, np.ndarray]]:
    """Sum the gradients of each class over chunks of its examples, see `chunks_per_class`; also return the scores.

    `advance` is called with the number of examples of each chunk.
    """
    per_class = chunks_per_class(num_parameters(params), num_classes)
    totals = np.empty((num_classes * per_class, num_parameters(params)), np.float32)
    classes: list[int] = []
    sizes: list[int] = []
    chunk_of = np.zeros(len(split), np.int64)
    scores: dict[str, np.ndarray] = {}
    for label in range(num_classes):
        members = np.flatnonzero(split.labels == label)
        if not len(members):
            continue
        parts = np.split(members, range(sums.batch_size, len(members), sums.batch_size))
        if len(parts) < per_class:  # a bootstrap over few chunks would underestimate the spread
            parts = np.array_split(members, min(per_class, len(members)))
        for group in np.array_split(np.arange(len(parts)), min(per_class, len(parts))):
            batches = [parts[part] for part in group]
            started = (sums.function(params, *sums.masked_batch(split, rows)) for rows in batches)
            total, results = totals[len(sizes)], zip(batches, batching.overlapped(started), strict=True)
            for number, (rows, (part_scores, part_sum)) in enumerate(results):
                flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(part_sum)])
                total[:] = total + flat if number else flat
                for name, values in part_scores.items():
                    column = scores.setdefault(name, np.empty(len(split), values.dtype))
                    column[rows] = np.asarray(values)[: len(rows)]
            rows = np.concatenate(batches)
            chunk_of[rows] = len(sizes)
            classes.append(label)
            sizes.append(len(rows))
            advance(len(rows))
    chunks = ChunkGradients(
        sums=totals[: len(sizes)], classes=np.array(classes), sizes=np.array(sizes), chunk_of=chunk_of
    )
    return chunks, scores


def chunks_per_class(num_parameters: int, num_classes: int) -> int:
    """Return the number of chunks per class: 10, or as many as fit into 512 MiB, but 2 at least."""
    return int(np.clip(_CHUNK_FLOATS // (num_parameters * num_classes), 2, _CHUNKS_PER_CLASS))


def chunk_bytes(num_parameters: int, num_classes: int) -> int:
    """Return the bytes of `ChunkGradients.sums` on the host; they exceed 512 MiB only with 2 chunks a class."""
    return 4 * num_parameters * num_classes * chunks_per_class(num_parameters, num_classes)


@dataclass(frozen=True, kw_only=True)
class ClassStructure:
    """Similarity of the classes' gradients, float64; NaN if a class has no example, or no pair of examples."""

    cosine: Classes  # cosine between the mean gradients of two classes
    # mean inner product of the gradients of two distinct examples, one of each class, over the product of the
    # classes' root mean square norms: 1 if all are parallel, 0 if they are orthogonal on average
    coherence: Classes
    # ⟨Gc, G⟩ / ‖G‖² of the summed gradients of a class and of all examples: to first order, the share of the class in
    # the decrease of the summed loss by a gradient step. The shares sum to 1; that of a class whose gradient opposes
    # the sum, so that its own loss increases, is negative.
    share: Float[np.ndarray, " classes"]

    @classmethod
    def unknown(cls, num_classes: int) -> "ClassStructure":
        """Return the structure of an empty split: all NaN."""
        nothing = np.full((num_classes, num_classes), np.nan)
        return cls(cosine=nothing, coherence=nothing, share=nothing[0])

    @property
    def within(self) -> float:
        """Mean coherence of a class with itself; NaN if no class has two examples."""
        return _mean_of_finite(np.diag(self.coherence))

    @property
    def across(self) -> float:
        """Mean coherence of two distinct classes; NaN if there is only one."""
        return _mean_of_finite(self.coherence[~np.eye(len(self.coherence), dtype=bool)])


def class_structure(
    products: Float[np.ndarray, "chunks chunks"],
    squares: Float[np.ndarray, " chunks"],
    chunks: ChunkGradients,
    num_classes: int,
) -> ClassStructure:
    """Compute the similarity of the classes' gradients.

    Args:
        products: inner products of the chunks' summed gradients, float64.
        squares: sum of the examples' squared gradient norms by chunk, float64.
    """
    is_member = np.equal.outer(np.arange(num_classes), chunks.classes).astype(np.float64)
    between = np.einsum("al,bl->ab", np.einsum("ak,kl->al", is_member, products), is_member)
    squares, sizes = (np.einsum("ak,k->a", is_member, values) for values in (squares, chunks.sizes))
    with np.errstate(divide="ignore", invalid="ignore"):
        norms = np.sqrt(np.diag(between))
        cosine = between / np.outer(norms, norms)
        pairs = np.outer(sizes, sizes) - np.diag(sizes)
        pairs = np.where(pairs > 0, pairs, np.nan)  # 0 / 0 would be infinite after rounding of the sums
        root_mean_square = np.sqrt(squares / sizes)
        coherence = (between - np.diag(squares)) / pairs / np.outer(root_mean_square, root_mean_square)
        share = np.where(sizes > 0, np.sum(between, axis=1) / np.sum(between), np.nan)
    return ClassStructure(cosine=cosine, coherence=coherence, share=share)


def _mean_of_finite(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.mean(finite)) if len(finite) else np.nan
