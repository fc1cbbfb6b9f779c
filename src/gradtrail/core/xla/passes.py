"""Functions compiled for as many examples as fit into a budget of memory, and applied to splits of any size.

The number of examples may change last digits. It follows from the compiled function and a fixed budget, never from the
memory that is free: no machine's memory changes a result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gradtrail.core import batching
from gradtrail.core.data import Split
from gradtrail.core.xla.compiler import CompiledFunction

# Bytes of temporary arrays, by kind of device. A CPU is slower with more than fits into its caches, and five times as
# slow from 32 MiB on, which the C library gives back to the system after each call. A GPU, measured on an H200, is
# slower with less than 4,096 examples of an MLP.
TEMPORARY_BYTES = {"cpu": 30 * 2**20, "gpu": 2**30}
_FLOPS_PER_BYTE = 10  # FLOPs in the time of one byte of memory traffic, as measured on CPUs


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A function compiled for one batch size, applied to splits of any size."""

    function: CompiledFunction  # (params, *shared, images, labels) → dict of arrays with a row per example
    batch_size: int

    def __call__(
        self,
        params: Any,
        images: np.ndarray,
        labels: np.ndarray,
        *shared: Any,
        advance: Callable[..., object] = lambda _: None,
    ) -> dict[str, np.ndarray]:
        """Return a row for each example; `advance` is called with the number of rows of each batch."""
        parts = []
        for part in batching.map_batches(
            lambda *batch: self.function(params, *shared, *batch), self.batch_size, images, labels
        ):
            parts.append(part)
            advance(len(next(iter(part.values()))))
        return batching.join(parts)

    def masked_batch(self, split: Split, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a batch of these rows, padded with repeated rows, whose mask is false."""
        padded = np.resize(rows, self.batch_size)
        return split.images[padded], split.labels[padded], np.arange(self.batch_size) < len(rows)

    @property
    def work(self) -> float:
        """Static cost of one example, in FLOPs: those of the program, or its memory traffic if that takes longer."""
        cost = self.function.cost
        return max(cost.flops, _FLOPS_PER_BYTE * cost.touched_bytes) / self.batch_size


def compile_within(largest: int, compile_at: Callable[[int], CompiledFunction], *, at_least: int = 1) -> Pass:
    """Compile a function for the `fitting_size`; `compile_at` is batch size → the function."""
    functions: dict[int, CompiledFunction] = {}

    def compiled_bytes(size: int) -> int:
        functions[size] = compile_at(size)
        return functions[size].cost.temporary_bytes

    size = fitting_size(largest, compiled_bytes, at_least=at_least)
    return Pass(function=functions[size], batch_size=size)


def fitting_size(largest: int, compiled_bytes: Callable[[int], int], *, at_least: int = 1) -> int:
    """Return the largest batch size whose temporary arrays fit into the budget of the device.

    Args:
        largest: the first batch size to try; then the powers of two below it, which XLA's loops handle best.
        compiled_bytes: batch size → bytes of the temporary arrays of the function that is compiled for it.
        at_least: smallest batch size, which is accepted whatever it needs.
    """
    size, budget = largest, TEMPORARY_BYTES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    while (needed := compiled_bytes(size)) > budget and size > at_least:
        while size > at_least and needed > budget:  # memory is nearly proportional to the size
            smaller = max(at_least, 2 ** ((size - 1).bit_length() - 1))
            size, needed = smaller, needed * smaller // size
    return size
