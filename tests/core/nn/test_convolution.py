"""Convolution and pooling against XLA's own, forward and backward, in every precision."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradtrail.core.nn.convolution import by_example, convolve, max_pool, patches
from gradtrail.core.nn.precision import Precision

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
CASES = [  # kernel size, channels, height, width, batch, features
    ("float32", (3, 1, 6, 6, 4, 5)),
    ("float32", (1, 4, 7, 5, 1, 1)),
    ("bfloat16", (3, 4, 7, 5, 1, 1)),
    ("bfloat16", (5, 1, 2, 1, 1, 2)),  # the kernel sees beyond every edge
    ("bfloat16", (3, 16, 16, 16, 5, 16)),  # sums so long that in 16 bits they would be wrong in the third digit
    ("float16", (3, 16, 16, 16, 5, 16)),
    ("float16", (1, 2, 3, 3, 2, 10)),
]
Arrays = tuple[np.ndarray, ...]


def operands(size: int, channels: int, height: int, width: int, batch: int, features: int) -> Arrays:
    """Return inputs, a kernel and the outputs' cotangent, all positive, so that no sum cancels."""
    rng = np.random.default_rng(0)
    shapes = (channels, height, width, batch), (size, size, channels, features), (features, height, width, batch)
    return tuple(rng.uniform(0.5, 1.5, shape).astype(np.float32) for shape in shapes)


def computed(
    inputs: jax.Array, kernel: jax.Array, cotangent: jax.Array, *, precision: Precision
) -> tuple[jax.Array, ...]:
    outputs, pull_back = jax.vjp(lambda inputs, kernel: convolve(inputs, kernel, precision), inputs, kernel)
    return outputs, *pull_back(cotangent)


def exact(*arrays: np.ndarray, precision: Precision) -> Arrays:
    """Return the convolution of rounded operands and its gradients for a rounded cotangent, in float64."""
    inputs, kernel, cotangent = (array.astype(DTYPES[precision]).astype(np.float64) for array in arrays)
    size, (height, width) = len(kernel), inputs.shape[1:3]
    edge = (size // 2, size // 2)
    padded = np.pad(inputs, [(0, 0), edge, edge, (0, 0)])
    outputs, of_padded, of_kernel = np.zeros_like(cotangent), np.zeros_like(padded), np.zeros_like(kernel)
    for row, column in np.ndindex(size, size):
        seen = np.s_[:, row : row + height, column : column + width]
        outputs += np.tensordot(kernel[row, column], padded[seen], (0, 0))
        of_padded[seen] += np.tensordot(kernel[row, column], cotangent, (1, 0))
        of_kernel[row, column] = np.tensordot(padded[seen], cotangent, ((1, 2, 3), (1, 2, 3)))
    return outputs, of_padded[:, edge[0] : edge[0] + height, edge[0] : edge[0] + width], of_kernel


def assert_close(found: tuple, expected: Arrays) -> None:
    for name, ours, theirs in zip(("outputs", "of inputs", "of kernel"), found, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize(("precision", "shape"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_rounded_operands_in_a_compiled_loop(
    precision: Precision, shape: tuple[int, ...]
) -> None:
    arrays = operands(*shape)

    @jax.jit
    def loop(stop: jax.Array, inputs: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        def body(_: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return jax.tree.map(jnp.add, totals, computed(inputs, kernel, cotangent, precision=precision))

        return jax.lax.fori_loop(0, stop, body, tuple(map(jnp.zeros_like, (cotangent, inputs, kernel))))

    expected = tuple(2 * array for array in exact(*arrays, precision=precision))
    assert_close(loop(np.int32(2), *arrays), expected)


def test_in_float32_it_is_the_convolution_of_xla() -> None:
    inputs, kernel, cotangent = operands(5, 3, 5, 8, 3, 10)

    def by_xla(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        layout = ("CHWN", "HWIO", "CHWN")
        return jax.lax.conv_general_dilated(inputs, kernel, (1, 1), "SAME", dimension_numbers=layout)

    @jax.jit
    def run(inputs: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        outputs, pull_back = jax.vjp(by_xla, inputs, kernel)
        return outputs, *pull_back(cotangent)

    found = jax.jit(functools.partial(computed, precision="float32"))(inputs, kernel, cotangent)
    assert_close(found, run(inputs, kernel, cotangent))


@pytest.mark.parametrize(
    ("precision", "channels", "features"),
    [("float32", 4, 10), ("bfloat16", 1, 10), ("float16", 1, 4)],
)
def test_each_example_has_its_own_outputs_and_gradients(precision: Precision, channels: int, features: int) -> None:
    inputs, kernel, cotangent = operands(3, channels, 6, 4, 3, features)

    def of_one(image: jax.Array, kernel: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        return computed(image[..., None], kernel, cotangent[..., None], precision=precision)

    found = jax.jit(jax.vmap(of_one, in_axes=(-1, None, -1)))(inputs, kernel, cotangent)
    for index in range(3):
        one = (inputs[..., index : index + 1], kernel, cotangent[..., index : index + 1])
        assert_close(tuple(array[index] for array in found), exact(*one, precision=precision))
    of_batch = exact(inputs, kernel, cotangent, precision=precision)[2]
    np.testing.assert_allclose(np.sum(found[2], axis=0), of_batch, rtol=2e-5)


def test_float32_has_every_derivative() -> None:
    inputs, kernel, _ = operands(3, 1, 4, 3, 2, 2)
    along = np.cos(np.arange(kernel.size)).reshape(kernel.shape).astype(np.float32)

    def cubes(kernel: jax.Array) -> jax.Array:
        return jnp.sum(convolve(jnp.asarray(inputs), kernel, "float32") ** 3)

    found = jax.jit(lambda kernel: jax.jvp(jax.grad(cubes), (kernel,), (along,))[1])(kernel)
    outputs, _, _ = exact(inputs, kernel, np.zeros((2, 4, 3, 2), np.float32), precision="float32")
    moved, _, _ = exact(inputs, along, np.zeros((2, 4, 3, 2), np.float32), precision="float32")
    _, _, expected = exact(inputs, kernel, (6 * outputs * moved).astype(np.float32), precision="float32")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("size", [1, 3])
def test_patches_are_what_the_kernel_sees_of_each_pixel(size: int) -> None:
    channels, height, width, batch = 2, 4, 3, 2
    inputs = np.arange(1.0, 1 + channels * height * width * batch, dtype=np.float32)
    inputs = inputs.reshape(channels, height, width, batch)
    columns = jax.jit(lambda inputs: patches(inputs, size))(inputs)
    found = np.asarray(columns).reshape(size, size, channels, height, width, batch)
    edge = size // 2
    for row, column, *pixel in np.ndindex(size, size, height, width):
        above, left = pixel[0] + row - edge, pixel[1] + column - edge
        inside = 0 <= above < height and 0 <= left < width
        wanted = inputs[:, above, left] if inside else np.zeros((channels, batch))
        np.testing.assert_array_equal(found[row, column, :, pixel[0], pixel[1]], wanted)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_by_example_the_same_patches_meet_the_same_cotangents(size: int) -> None:
    """Between the rows of an image lie columns of no meaning, where the cotangent is zero."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(2, 4, 3, 6)).astype(np.float32)
    cotangent = rng.normal(size=(5, 4, 3, 6)).astype(np.float32)
    columns, deltas = jax.jit(lambda *arrays: by_example(*arrays, size))(inputs, cotangent)
    whole = np.asarray(patches(jnp.asarray(inputs), size)).reshape(-1, 4, 3, 6)
    shaped = np.asarray(columns).reshape(6, -1, 4, 3 + size - 1)
    np.testing.assert_array_equal(shaped[..., :3], np.moveaxis(whole, -1, 0))
    around = np.asarray(deltas).reshape(6, 4, 3 + size - 1, 5)
    np.testing.assert_array_equal(around[:, :, :3], np.transpose(cotangent, (3, 1, 2, 0)))
    assert not around[:, :, 3:].any()


def pooled_by_max(inputs: jax.Array) -> jax.Array:
    channels, height, width, batch = inputs.shape
    whole = inputs[:, : height // 2 * 2, : width // 2 * 2]
    return jnp.max(whole.reshape(channels, height // 2, 2, width // 2, 2, batch), axis=(2, 4))


@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (1, 5, 7, 2), (3, 2, 3, 1)], ids=str)
def test_pooling_equals_the_maximum_and_ties_share_its_gradient(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.integers(0, 3, shape), jnp.float32)  # of three values, so that most windows have ties
    cotangent = jnp.asarray(rng.normal(size=(shape[0], shape[1] // 2, shape[2] // 2, shape[3])), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function: Callable) -> tuple[jax.Array, jax.Array]:
        outputs, pull_back = jax.vjp(function, inputs)
        return outputs, pull_back(cotangent)[0]

    for ours, theirs in zip(run(max_pool), run(pooled_by_max), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_pooling_has_gradients_of_each_example_and_derivatives_of_gradients() -> None:
    inputs = jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 5, 4, 3)), jnp.float32)

    def cubes(function: Callable, inputs: jax.Array) -> jax.Array:
        return jnp.sum(function(inputs) ** 3)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function: Callable) -> tuple[jax.Array, jax.Array]:
        gradient = jax.grad(functools.partial(cubes, function))
        each = jax.vmap(lambda image: gradient(image[..., None])[..., 0], in_axes=-1, out_axes=-1)(inputs)
        return each, jax.jvp(gradient, (inputs,), (jnp.ones_like(inputs),))[1]

    for ours, theirs in zip(run(max_pool), run(pooled_by_max), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
