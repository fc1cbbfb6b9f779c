"""Processes that share work, played by threads of this one: what they gather goes through the real packing."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
from jax.experimental import multihost_utils

from gradtrail.core.common.together import gather_rows

T = TypeVar("T")
_SECONDS = 60.0  # that one waits for the others


@dataclass(frozen=True)
class One:
    """One of several processes."""

    index: int
    count: int

    def gather(self, rows: Mapping[str, np.ndarray], lengths: Sequence[int]) -> dict[str, np.ndarray]:
        return gather_rows(rows, lengths)


def in_processes(count: int, work: Callable[[One], T]) -> list[T]:
    """Return what each of so many processes returns."""
    barrier, given = threading.Barrier(count), dict[int, np.ndarray]()
    here = threading.local()

    def exchange(packed: np.ndarray) -> np.ndarray:
        given[here.index] = packed.copy()
        barrier.wait(_SECONDS)
        found = np.stack([given[index] for index in range(count)])
        barrier.wait(_SECONDS)
        return found

    def one(index: int) -> T:
        here.index = index
        try:
            return work(One(index, count))
        except BaseException:
            barrier.abort()
            raise

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as pool:
        patch.setattr(multihost_utils, "process_allgather", exchange)
        return list(pool.map(one, range(count)))
