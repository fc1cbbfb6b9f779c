"""Convolution as patches times a matrix, and pooling, with the batch as the last axis.

Inside a compiled loop XLA's CPU backend runs convolutions without its fast kernels (jax issue 12868), matrix products
with them. With the batch as the last axis, shifting an image or a pooling window moves contiguous rows of memory.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from gradtrail.core.nn.precision import Precision, contract, transposed


def convolve(
    inputs: Float[Array, "channels height width batch"],
    kernel: Float[Array, "size size channels features"],
    precision: Precision,
) -> Float[Array, "features height width batch"]:
    """Convolve with stride 1 and zero padding; float32, operands rounded to `precision`, sums in float32.

    The same holds for the backward pass. It has reverse-mode derivatives only; in float32 these also have forward-mode
    derivatives.
    """
    return _convolve(inputs, kernel, precision)


def patches(
    inputs: Shaped[Array, "channels height width batch"], size: int
) -> Shaped[Array, "{size}*{size}*channels height*width*batch"]:
    """Return the zero-padded neighbourhood of each pixel as a column; `size` is odd."""
    channels, height, width, batch = inputs.shape
    padded = jnp.pad(inputs, _padding(size))
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


def max_pool(
    inputs: Float[Array, "channels height width batch"],
) -> Float[Array, "channels height//2 width//2 batch"]:
    """Return the maximum of each window of 2 × 2; an odd last row or column is left out.

    Equal maxima share the gradient equally, as for `jnp.max`. It has reverse-mode derivatives only; these also have
    forward-mode derivatives.
    """
    height, width = inputs.shape[1] // 2 * 2, inputs.shape[2] // 2 * 2
    return _max_pool(inputs[:, :height, :width])


@jax.custom_vjp
def _max_pool(inputs: Array) -> Array:
    return functools.reduce(jnp.maximum, _corners(inputs))


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
    """Return the four pixels of every window of 2 × 2."""
    return [inputs[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]


def _spread(pooled: Array) -> Array:
    """Repeat each pixel over its window."""
    return jnp.repeat(jnp.repeat(pooled, 2, axis=1), 2, axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolve(inputs: Array, kernel: Array, precision: Precision) -> Array:
    return _convolve_forward(inputs, kernel, precision)[0]


def _convolve_forward(inputs: Array, kernel: Array, precision: Precision) -> tuple[Array, tuple[Array, Array]]:
    inputs, kernel = _operand(inputs, precision), _operand(kernel, precision)
    outputs = contract(transposed(_as_matrix(kernel)), _fast_patches(inputs, len(kernel)), 1, 0)
    return outputs.reshape(-1, *inputs.shape[1:]), (inputs, kernel)


def _convolve_backward(precision: Precision, residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    inputs, kernel = residuals
    size = len(kernel)
    cotangent = _operand(cotangent, precision).reshape(kernel.shape[-1], -1)
    kernel_grad = contract(_fast_patches(inputs, size), cotangent, 1, 1).reshape(kernel.shape)
    patches_grad = contract(_as_matrix(kernel), cotangent, 1, 0)
    return _sum_patches(patches_grad, inputs.shape, size), kernel_grad


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _operand(array: Array, precision: Precision) -> Array:
    """Round to a low precision; with precision float32, the float64 of exact gradients stays unchanged."""
    return array if precision == "float32" else array.astype(precision)


def _sum_patches(columns: Array, shape: tuple[int, ...], size: int) -> Array:
    """Add up the patches at each pixel: the transpose of `patches`."""
    zeros = jax.ShapeDtypeStruct(shape, columns.dtype)
    (summed,) = jax.linear_transpose(functools.partial(patches, size=size), zeros)(columns)
    return summed


def _fast_patches(inputs: Array, size: int) -> Array:
    """Copy 16-bit floats as integers: XLA's CPU backend would convert each to float32 and back."""
    if inputs.dtype.itemsize > 2:
        return jax.lax.optimization_barrier(patches(inputs, size))
    moved = patches(jax.lax.bitcast_convert_type(inputs, jnp.uint16), size)
    return jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(moved, inputs.dtype))


def _as_matrix(kernel: Array) -> Array:
    """Return the kernel with a column for each feature, and rows in the order of `patches`."""
    return kernel.reshape(-1, kernel.shape[-1])


def _padding(size: int) -> list[tuple[int, int]]:
    edge = (size // 2, size // 2)
    return [(0, 0), edge, edge, (0, 0)]
