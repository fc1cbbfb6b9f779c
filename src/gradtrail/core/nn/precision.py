"""Number formats of matrix products; parameters, optimizer state and all other arithmetic stay float32."""

import functools
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Precision = Literal["float32", "bfloat16", "float16"]
Matrix: TypeAlias = Float[Array, "_ _"]


def matmul(lhs: Float[Array, "rows inner"], rhs: Float[Array, "inner columns"], precision: Precision) -> Matrix:
    """Return the product of two float32 matrices, float32, with operands rounded to `precision`.

    Forward and backward, operands and cotangents are rounded to `precision`, products are summed in float32, and the
    sum is not rounded: mixed precision as by Micikevicius et al. (arXiv 1710.03740). A low precision has a
    reverse-mode derivative only; float32 has every derivative.
    """
    return jax.lax.dot(lhs, rhs) if precision == "float32" else _low_matmul(lhs, rhs, precision)


def rounded(array: Float[Array, "..."], precision: Precision) -> Float[Array, "..."]:
    """Return an operand as a product in `precision` uses it: rounded, then cast back to float32."""
    return array.astype(precision).astype(jnp.float32)


def contract(lhs: Matrix, rhs: Matrix, lhs_axis: int, rhs_axis: int) -> Matrix:
    """Contract one axis of each operand, accumulating in float32 whatever their dtype; float64 in float64."""
    lhs, rhs = jax.lax.optimization_barrier((lhs, rhs))  # XLA's CPU backend fails on some transposes that it folds in
    dimensions = (((lhs_axis,), (rhs_axis,)), ((), ()))
    dtype = jnp.float64 if lhs.dtype == jnp.float64 else jnp.float32
    return jax.lax.dot_general(lhs, rhs, dimensions, preferred_element_type=dtype)


def matmul_transposed(
    lhs: Float[Array, "inner rows"], rhs: Float[Array, "inner columns"], precision: Precision
) -> Matrix:
    """Return lhsᵀ rhs, with operands rounded to `precision`; it has no derivative."""
    if precision == "float32":
        return contract(lhs, rhs, 0, 0)  # for dense layers, this is faster than with a copy
    return contract(transposed(lhs.astype(precision)), rhs.astype(precision), 1, 0)


def transposed(matrix: Float[Array, "rows columns"]) -> Float[Array, "columns rows"]:
    """Return the transpose; on a CPU as a contiguous copy.

    XLA's CPU backend has its fast products for matrices in row-major order only: one with a transposed left operand
    takes longer than this copy and the product together, in a low precision three times (at 784 × 128 × 256), in
    float32 1.4 times (a convolution's, at 64 × 288 × 6,272). Not so a dense layer's in float32: `matmul_transposed`.
    """
    return jax.lax.platform_dependent(matrix, cpu=_contiguous_transpose, default=jnp.transpose)


def _contiguous_transpose(matrix: Matrix) -> Matrix:
    flat = jax.lax.optimization_barrier(matrix.T.reshape(-1))
    return flat.reshape(matrix.shape[::-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _low_matmul(lhs: Array, rhs: Array, precision: Precision) -> Array:
    return _low_matmul_forward(lhs, rhs, precision)[0]


def _low_matmul_forward(lhs: Array, rhs: Array, precision: Precision) -> tuple[Array, tuple[Array, Array]]:
    low = lhs.astype(precision), rhs.astype(precision)
    return contract(*low, 1, 0), low


def _low_matmul_backward(precision: Precision, low: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    lhs, rhs = low
    cotangent = cotangent.astype(precision)
    return contract(cotangent, rhs, 1, 1), contract(transposed(lhs), cotangent, 1, 0)


_low_matmul.defvjp(_low_matmul_forward, _low_matmul_backward)
