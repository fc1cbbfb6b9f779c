"""What the machine can do at best at this moment: matrix products and copies, to hold a function's rates against."""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_SIDE = 1024  # of the matrices
_COPIED_BYTES = 64 * 2**20  # beyond the caches of most processors
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Rates of the first local device, or of all cores of a processor.

    Attributes:
        flops_per_second: of a product of float32 matrices, 2 n³ FLOPs each.
        bytes_per_second: of a copy in place, read and written.
    """

    flops_per_second: float
    bytes_per_second: float


def measure_rates(clock: Callable[[], float]) -> MachineRates:
    """Measure both rates, as medians after a warm-up; `clock` returns seconds."""
    matrix = jnp.ones((_SIDE, _SIDE), jnp.float32)
    vector = jnp.ones(_COPIED_BYTES // 4, jnp.float32)

    def copy() -> jax.Array:
        nonlocal vector
        vector = _negated_in_place(vector)
        return vector

    return MachineRates(
        flops_per_second=2 * _SIDE**3 / _median_seconds(lambda: _product(matrix, matrix), clock),
        bytes_per_second=2 * _COPIED_BYTES / _median_seconds(copy, clock),
    )


@jax.jit
def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return left @ right


@functools.partial(jax.jit, donate_argnums=0)
def _negated_in_place(vector: jax.Array) -> jax.Array:
    """Return what cannot be had without reading and writing all; memory fresh from the system takes far longer."""
    return -vector


def _median_seconds(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    def once() -> float:
        started = clock()
        jax.block_until_ready(call())
        return clock() - started

    once()
    return statistics.median(once() for _ in range(_ROUNDS))
