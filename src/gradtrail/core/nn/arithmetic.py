"""Matrix products and convolutions with rounded operands, pooling, and rematerialization.

Parameters, optimizer state and all other arithmetic stay float32: mixed precision as by Micikevicius et al. (arXiv
1710.03740).

A convolution is a product of patches and kernel: inside a compiled loop XLA's CPU backend runs convolutions without its
fast kernels (jax issue 12868), matrix products with them. With the batch as the last axis, shifting an image or a
pooling window moves contiguous rows of memory.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Shaped

Precision = Literal["float32", "bfloat16", "float16"]
Matrix: TypeAlias = Float[Array, "_ _"]


def matmul(lhs: Float[Array, "rows inner"], rhs: Float[Array, "inner columns"], precision: Precision) -> Matrix:
    """Return the product of two float32 matrices, float32, with operands rounded to `precision`.

    Forward and backward, operands and cotangents are rounded to `precision`, products are summed in float32, and the
    sum is not rounded. A low precision has a reverse-mode derivative only; float32 has every derivative.
    """
    if precision == "float32":
        return _narrowed(jax.lax.dot(lhs, _widened(rhs, 1)), rhs.shape[1])
    return _low_matmul(lhs, rhs, precision)


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


def matmul_transposed(
    lhs: Float[Array, "inner rows"], rhs: Float[Array, "inner columns"], precision: Precision
) -> Matrix:
    """Return lhsᵀ rhs, with operands rounded to `precision`; it has no derivative."""
    if precision == "float32":
        return contract(lhs, rhs, 0, 0)  # for dense layers, this is faster than with a copy
    return contract(transposed(lhs.astype(precision)), rhs.astype(precision), 1, 0)


def contract(lhs: Matrix, rhs: Matrix, lhs_axis: int, rhs_axis: int) -> Matrix:
    """Contract one axis of each operand, accumulating in float32 whatever their dtype; float64 in float64."""
    columns, rhs = rhs.shape[1 - rhs_axis], _widened(rhs, 1 - rhs_axis)
    lhs, rhs = jax.lax.optimization_barrier((lhs, rhs))  # XLA's CPU backend fails on some transposes that it folds in
    dimensions = (((lhs_axis,), (rhs_axis,)), ((), ()))
    dtype = jnp.float64 if lhs.dtype == jnp.float64 else jnp.float32
    product = jax.lax.dot_general(lhs, rhs, dimensions, preferred_element_type=dtype)
    return _narrowed(product, columns)


def _widened(rhs: Matrix, axis: int) -> Matrix:
    """Pad 17 to 47 columns of a product with zeros, to a multiple of 16.

    YNNPACK splits long sums by the width of its tiles, which for 17 to 24 and for 33 to 40 columns differs between
    AVX2 and AVX-512: the sums would differ in last bits.
    """
    columns = rhs.shape[axis]  # of an export it may be a symbol, with the size of the batch
    more = -columns % 16 if isinstance(columns, int) and 16 < columns < 48 else 0
    widths = [(0, more if dimension == axis else 0) for dimension in range(2)]
    return jnp.pad(rhs, widths) if more else rhs


def _narrowed(product: Matrix, columns: Any) -> Matrix:
    return product[:, :columns] if product.shape[1] != columns else product


def transposed(matrix: Float[Array, "rows columns"]) -> Float[Array, "columns rows"]:
    """Return the transpose; on a CPU as a contiguous copy.

    XLA's CPU backend has its fast products for matrices in row-major order only: one with a transposed left operand
    takes longer than this copy and the product together, in a low precision three times (at 784 × 128 × 256), in
    float32 1.4 times (a convolution's, at 64 × 288 × 6,272). Not so a dense layer's in float32: `matmul_transposed`.
    """

    def contiguous(matrix: Matrix) -> Matrix:
        return jax.lax.optimization_barrier(matrix.T.reshape(-1)).reshape(matrix.shape[::-1])

    return jax.lax.platform_dependent(matrix, cpu=contiguous, default=jnp.transpose)


def rounded(array: Float[Array, "..."], precision: Precision) -> Float[Array, "..."]:
    """Return an operand as a product in `precision` uses it: rounded, then cast back to float32."""
    return array.astype(precision).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(
    inputs: Float[Array, "channels height width batch"],
    kernel: Float[Array, "size size channels features"],
    precision: Precision,
) -> Float[Array, "features height width batch"]:
    """Convolve with stride 1 and zero padding; float32, operands rounded to `precision`, sums in float32.

    The same holds for the backward pass. It has reverse-mode derivatives only; in float32 these also have forward-mode
    derivatives.
    """
    return _convolve_forward(inputs, kernel, precision)[0]


def convolve_for_inference(inputs: Array, kernel: Array, precision: Precision) -> Array:
    """Return `convolve` by XLA's own convolution: faster, and compiled sooner, outside a loop on a CPU.

    Its fast kernels have the channels as the last axis; XLA removes most of the transposes.
    """
    images = jnp.transpose(rounded(inputs, precision), (3, 1, 2, 0))
    dimensions = ("NHWC", "HWIO", "NHWC")
    outputs = jax.lax.conv_general_dilated(
        images, rounded(kernel, precision), (1, 1), "SAME", dimension_numbers=dimensions
    )
    return jnp.transpose(outputs, (3, 1, 2, 0))


def _convolve_forward(inputs: Array, kernel: Array, precision: Precision) -> tuple[Array, tuple[Array, Array]]:
    inputs, kernel = _operand(inputs, precision), _operand(kernel, precision)
    matrix = kernel.reshape(-1, kernel.shape[-1])  # a column for each feature, rows in the order of `patches`
    outputs = contract(transposed(matrix), _fast_patches(inputs, len(kernel)), 1, 0)
    return outputs.reshape(-1, *inputs.shape[1:]), (inputs, kernel)


def _convolve_backward(precision: Precision, residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    inputs, kernel = residuals
    size = len(kernel)
    cotangent = _operand(cotangent, precision).reshape(kernel.shape[-1], -1)
    kernel_grad = contract(_fast_patches(inputs, size), cotangent, 1, 1).reshape(kernel.shape)
    # The gradient of the inputs adds up the patches at each pixel: the transpose of `patches`
    patches_grad = contract(kernel.reshape(-1, len(cotangent)), cotangent, 1, 0)
    zeros = jax.ShapeDtypeStruct(inputs.shape, patches_grad.dtype)
    (inputs_grad,) = jax.linear_transpose(functools.partial(patches, size=size), zeros)(patches_grad)
    return inputs_grad, kernel_grad


convolve.defvjp(_convolve_forward, _convolve_backward)


def _operand(array: Array, precision: Precision) -> Array:
    """Round to a low precision; with precision float32, operands stay as they are, float64 ones too."""
    return array if precision == "float32" else array.astype(precision)


def _fast_patches(inputs: Array, size: int) -> Array:
    """Copy 16-bit floats as integers: XLA's CPU backend would convert each to float32 and back."""
    if inputs.dtype.itemsize > 2:
        return jax.lax.optimization_barrier(patches(inputs, size))
    moved = patches(jax.lax.bitcast_convert_type(inputs, jnp.uint16), size)
    return jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(moved, inputs.dtype))


def patches(
    inputs: Shaped[Array, "channels height width batch"], size: int
) -> Shaped[Array, "{size}*{size}*channels height*width*batch"]:
    """Return the zero-padded neighbourhood of each pixel as a column; `size` is odd."""
    channels, height, width, batch = inputs.shape
    edge = (size // 2, size // 2)
    padded = jnp.pad(inputs, [(0, 0), edge, edge, (0, 0)])
    shifts = itertools.product(range(size), range(size))
    shifted = [padded[:, row : row + height, column : column + width] for row, column in shifts]
    return jnp.concatenate(shifted).reshape(size * size * channels, height * width * batch)


def patches_and_cotangents(
    inputs: Float[Array, "channels height width batch"],
    cotangent: Float[Array, "features height width batch"],
    size: int,
) -> tuple[Float[Array, "batch {size}*{size}*channels pixels"], Float[Array, "batch pixels features"]]:
    """Return patches and cotangents of each example, whose product is its gradient of the kernel.

    The rows of an image are stored one after the other with `size` - 1 pixels of padding between them, where the
    cotangent is zero: each shift of the image is contiguous memory, and the copies are cheap compared to the product.
    """
    edge = size // 2
    inputs, cotangent = jax.lax.optimization_barrier((inputs, cotangent))
    images, deltas = jnp.moveaxis(inputs, -1, 0), jnp.transpose(cotangent, (3, 1, 2, 0))
    images, deltas = jax.lax.optimization_barrier((images, deltas))
    batch, channels, height, width = images.shape
    stride = width + size - 1
    pixels = height * stride
    flat = jnp.pad(images, [(0, 0), (0, 0), (edge, edge + 1), (edge, edge)]).reshape(batch, channels, -1)
    starts = (row * stride + column for row, column in itertools.product(range(size), range(size)))
    columns = jnp.concatenate([flat[:, :, start : start + pixels] for start in starts], axis=1)
    between = jnp.pad(deltas, [(0, 0), (0, 0), (0, size - 1), (0, 0)]).reshape(batch, pixels, -1)
    return jax.lax.optimization_barrier((columns, between))


def space_to_depth(
    inputs: Float[Array, "channels height width batch"], size: int
) -> Float[Array, "{size}*{size}*channels height//{size} width//{size} batch"]:
    """Return each square of `size` × `size` pixels as one pixel with all their channels."""
    if size == 1:
        return inputs
    channels, height, width, batch = inputs.shape
    squares = inputs.reshape(channels, height // size, size, width // size, size, batch)
    return jnp.transpose(squares, (2, 4, 0, 1, 3, 5)).reshape(-1, height // size, width // size, batch)


def max_pool(inputs: Float[Array, "channels height width batch"]) -> Float[Array, "channels height//2 width//2 batch"]:
    """Return the maximum of each window of 2 × 2; an odd last row or column is left out.

    Equal maxima share the gradient equally, as for `jnp.max`. It has reverse-mode derivatives only; these also have
    forward-mode derivatives.
    """
    height, width = inputs.shape[1] // 2 * 2, inputs.shape[2] // 2 * 2
    return _max_pool(inputs[:, :height, :width])


@jax.custom_vjp
def _max_pool(inputs: Array) -> Array:
    return _max_pool_forward(inputs)[0]


def _max_pool_forward(inputs: Array) -> tuple[Array, tuple[Array, Array]]:
    largest = functools.reduce(jnp.maximum, _corners(inputs))
    return largest, (inputs, largest)


def _max_pool_backward(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array]:
    """Distribute the cotangent over the windows: XLA's derivative of strided slices takes five times as long."""
    inputs, largest = residuals
    ties = sum((corner == largest).astype(inputs.dtype) for corner in _corners(inputs))
    return (jnp.where(inputs == _spread(largest), _spread(cotangent / ties), 0.0),)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)


def _corners(inputs: Array) -> list[Array]:
    return [inputs[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]


def _spread(pooled: Array) -> Array:
    return jnp.repeat(jnp.repeat(pooled, 2, axis=1), 2, axis=2)


def rematerialized(
    function: Callable[[PyTree, Array], Float[Array, "..."]],
) -> Callable[[PyTree, Array], Float[Array, "..."]]:
    """Return `function` with a reverse-mode derivative that stores only its parameters and inputs.

    This is the purpose of `jax.checkpoint`, which has no effect on CPU: XLA removes its barriers before it merges equal
    computations, so FLOPs and memory stay the same (jaxlib 0.10.2). Here the recomputation depends on the
    cotangent through a zero that the compiler cannot prove to be one, so it is neither merged nor moved forward.
    """

    @jax.custom_vjp
    def call(params: PyTree, inputs: Array) -> Array:
        return function(params, inputs)

    def forward(params: PyTree, inputs: Array) -> tuple[Array, tuple[PyTree, Array]]:
        return function(params, inputs), (params, inputs)

    def backward(residuals: tuple[PyTree, Array], cotangent: Array) -> Any:
        params, inputs = residuals
        # NaN if the cotangent is not finite, and then the gradient is not finite either
        zero = 0.0 * cotangent[(0,) * cotangent.ndim]
        _, pull_back = jax.vjp(function, params, inputs + zero)
        return pull_back(cotangent)

    call.defvjp(forward, backward)
    return call
