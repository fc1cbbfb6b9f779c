"""What the machine can do at best at this moment: matrix products and copies, to hold a function's rates against."""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

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
    matrix = jnp.full((_SIDE, _SIDE), 1 / _SIDE, jnp.float32)  # its own square
    vector = jnp.ones(_COPIED_BYTES // 4, jnp.float32)
    return MachineRates(
        flops_per_second=2 * _SIDE**3 / _median_seconds(_square, matrix, clock),
        bytes_per_second=2 * _COPIED_BYTES / _median_seconds(_negate, vector, clock),
    )


@jax.jit
def _square(matrix: jax.Array) -> jax.Array:
    return matrix @ matrix


@functools.partial(jax.jit, donate_argnums=0)
def _negate(vector: jax.Array) -> jax.Array:  # in its place: memory that the system hands out anew is slower
    return -vector


def _median_seconds(function: Callable[[jax.Array], jax.Array], array: jax.Array, clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_ROUNDS + 1):
        started = clock()
        array = jax.block_until_ready(function(array))
        seconds.append(clock() - started)
    return statistics.median(seconds[1:])
