"""The number format of the matrix products; parameters, optimizer state and all other arithmetic stay float32."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Precision = Literal["float32", "bfloat16"]


class DotGeneral:
    """`jax.lax.dot_general` that takes its operands in a low precision and accumulates in float32.

    Made for the `dot_general` argument of `flax.nnx.Linear`. The product is returned in float32, so that a processor
    with bfloat16 tiles can use them without rounding the sum.
    """

    def __init__(self, precision: Precision):
        self._dtype = jnp.dtype(precision)

    def __call__(self, lhs: Float[Array, "..."], rhs: Float[Array, "..."], dimension_numbers: Any, **_: Any) -> Array:
        low = (lhs.astype(self._dtype), rhs.astype(self._dtype))
        return jax.lax.dot_general(*low, dimension_numbers, preferred_element_type=jnp.float32)
