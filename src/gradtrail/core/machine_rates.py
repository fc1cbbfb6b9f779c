"""What the machine can do at best at this moment: matrix products and copies, to hold a function's rates against."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_SIDE = 768  # of the matrices
_COPIED_BYTES = 32 * 2**20  # beyond the caches of most processors
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Rates of the first local device, or of all cores of a processor.

    Attributes:
        flops_per_second: of a product of float32 matrices, 2 n³ FLOPs each.
        bytes_per_second: of a copy, read and written.
    """

    flops_per_second: float
    bytes_per_second: float


def measure_rates(clock: Callable[[], float]) -> MachineRates:
    """Measure both rates, as medians after a warm-up; `clock` returns seconds."""
    matrix = jnp.ones((_SIDE, _SIDE), jnp.float32)
    vector = jnp.ones(_COPIED_BYTES // 4, jnp.float32)
    return MachineRates(
        flops_per_second=2 * _SIDE**3 / _median_seconds(_product, (matrix, matrix), clock),
        bytes_per_second=2 * _COPIED_BYTES / _median_seconds(_negated_copy, (vector,), clock),
    )


@jax.jit
def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return left @ right


@jax.jit
def _negated_copy(vector: jax.Array) -> jax.Array:  # a plain copy might be spared
    return -vector


def _median_seconds(function: Callable[..., Any], args: tuple[Any, ...], clock: Callable[[], float]) -> float:
    def once() -> float:
        started = clock()
        jax.block_until_ready(function(*args))
        return clock() - started

    once()
    return statistics.median(once() for _ in range(_ROUNDS))
