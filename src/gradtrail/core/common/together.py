"""Work that several processes share: each makes a range of it, and all get the results of all.

Gathering the results is the only collective. It moves bytes in slabs of one size, for which one program is compiled.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
from jax.experimental import multihost_utils

_SLAB = 2**20  # bytes that a process sends at once


class Together(Protocol):
    """The processes that share work; all ask for the same in the same order."""

    @property
    def index(self) -> int:
        """Number of this process, from 0."""

    @property
    def count(self) -> int:
        """Number of processes."""

    def gather(self, rows: Mapping[str, np.ndarray], lengths: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the rows of all processes, those of process 0 first, in each of them.

        Args:
            rows: arrays of as many rows as this process has, at least none; of the same types in all processes.
            lengths: the number of rows of each process.
        """


class Alone:
    """One process, which makes all of it."""

    index, count = 0, 1

    def gather(self, rows: Mapping[str, np.ndarray], lengths: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the rows as they are."""
        del lengths
        return dict(rows)


ALONE = Alone()


def shares(total: int, count: int) -> list[range]:
    """Divide so many pieces of work among processes: consecutive ranges whose lengths differ by one at most."""
    ends = [total * index // count for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def gather_rows(rows: Mapping[str, np.ndarray], lengths: Sequence[int]) -> dict[str, np.ndarray]:
    """Gather rows from all processes of JAX, see `Together.gather`."""
    if not sum(lengths):
        return dict(rows)
    widths = {name: _width(values) for name, values in rows.items()}
    packed = [
        np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8) for values in rows.values() if values.size
    ]
    own = np.concatenate(packed, axis=1).ravel() if packed else np.zeros(0, np.uint8)
    width = sum(widths.values())
    of_each = _gather_bytes(own, max(lengths) * width)
    together = np.concatenate([each[: length * width] for each, length in zip(of_each, lengths, strict=True)])
    table, found, at = together.reshape(sum(lengths), width), dict[str, np.ndarray](), 0
    for name, values in rows.items():
        part = np.ascontiguousarray(table[:, at : at + widths[name]])
        found[name] = part.reshape(-1).view(values.dtype).reshape(len(table), *values.shape[1:])
        at += widths[name]
    return found


def _gather_bytes(own: np.ndarray, most: int) -> np.ndarray:
    """Return the bytes of each process, `most` at most, padded to equal lengths."""
    slabs = np.zeros((-(-most // _SLAB), _SLAB), np.uint8)
    slabs.reshape(-1)[: len(own)] = own
    gathered = [np.asarray(multihost_utils.process_allgather(slab)) for slab in slabs]
    return np.concatenate(gathered, axis=1) if gathered else np.zeros((1, 0), np.uint8)


def _width(values: np.ndarray) -> int:
    """Return the bytes of a row."""
    return int(np.prod(values.shape[1:], dtype=np.int64)) * values.dtype.itemsize
