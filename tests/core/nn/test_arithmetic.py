"""Low-precision products and convolutions round their operands, never their sum, forward and backward, in any loop."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradtrail.core.nn.arithmetic import Precision, contract, convolve, convolve_for_inference, matmul, max_pool

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SHAPES = [(1, 1, 1), (1, 7, 10), (33, 5, 1), (13, 27, 10)]  # rows, inner, columns
LONG = [(3, 5000, 4), (5000, 3, 4), (3, 4, 5000)]  # each of the three products has a long sum in one of them
Arrays = tuple[np.ndarray, ...]


def factors(rows: int, inner: int, columns: int, *, batch: tuple[int, ...] = ()) -> Arrays:
    """Return two factors and the product's cotangent, all positive: a sum grows, and with it what rounding it costs."""
    rng = np.random.default_rng(0)
    shapes = (rows, inner), (inner, columns), (rows, columns)
    lhs, rhs, cotangent = (rng.uniform(0.5, 1.5, (*batch, *shape)).astype(np.float32) for shape in shapes)
    return lhs, rhs, cotangent


def exact_product(lhs: np.ndarray, rhs: np.ndarray, cotangent: np.ndarray, precision: Precision) -> Arrays:
    """Return the product and both gradients of rounded operands, in float64."""
    lhs, rhs, cotangent = (array.astype(DTYPES[precision]).astype(np.float64) for array in (lhs, rhs, cotangent))
    return lhs @ rhs, cotangent @ rhs.swapaxes(-1, -2), lhs.swapaxes(-1, -2) @ cotangent


def product(lhs: jax.Array, rhs: jax.Array, cotangent: jax.Array, *, precision: Precision) -> tuple[jax.Array, ...]:
    outputs, pull_back = jax.vjp(lambda lhs, rhs: matmul(lhs, rhs, precision), lhs, rhs)
    return outputs, *pull_back(cotangent)


def assert_close(result: tuple, expected: tuple) -> None:
    """Compare outputs and the gradients of both operands."""
    for name, ours, theirs in zip(("outputs", "of first", "of second"), result, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("precision", DTYPES)
def test_long_sums_are_in_float32_forward_and_backward(precision: Precision) -> None:
    inputs = [factors(*shape) for shape in LONG]
    products = jax.jit(lambda inputs: [product(*arrays, precision=precision) for arrays in inputs])
    for result, arrays in zip(products(inputs), inputs, strict=True):
        assert_close(result, exact_product(*arrays, precision))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_transposed_operands_of_any_shape_work_in_a_compiled_loop(precision: Precision) -> None:
    def loop(stop: jax.Array, *across: jax.Array) -> tuple[jax.Array, ...]:
        def body(index: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            result = product(*(array[index].T for array in across), precision=precision)
            return tuple(total + array for total, array in zip(totals, result, strict=True))

        lhs, rhs, cotangent = (jnp.zeros(array.shape[:0:-1]) for array in across)
        return jax.lax.fori_loop(0, stop, body, (cotangent, lhs, rhs))

    inputs = [factors(*shape, batch=(3,)) for shape in SHAPES]
    across = [[array.swapaxes(-1, -2).copy() for array in arrays] for arrays in inputs]
    loops = jax.jit(lambda stop, across: [loop(stop, *arrays) for arrays in across])
    for result, arrays in zip(loops(np.int32(3), across), inputs, strict=True):
        assert_close(result, tuple(array.sum(axis=0) for array in exact_product(*arrays, precision)))


def test_a_gradient_that_float16_cannot_hold_is_infinite_and_not_wrong() -> None:
    one = np.ones((1, 1), np.float32)
    _, of_lhs, of_rhs = jax.jit(functools.partial(product, precision="float16"))(one, one, 1e5 * one)
    assert np.isposinf(of_lhs)
    assert np.isposinf(of_rhs)


CASES = [  # kernel size, channels, height, width, batch, features
    ("float32", (3, 1, 6, 6, 4, 5)),
    ("float32", (1, 4, 7, 5, 1, 1)),
    ("bfloat16", (3, 4, 7, 5, 1, 1)),
    ("bfloat16", (5, 1, 2, 1, 1, 2)),  # the kernel sees beyond every edge
    ("bfloat16", (3, 16, 16, 16, 5, 16)),  # sums so long that in 16 bits they would be wrong in the third digit
    ("float16", (3, 16, 16, 16, 5, 16)),
    ("float16", (1, 2, 3, 3, 2, 10)),
]


def operands(size: int, channels: int, height: int, width: int, batch: int, features: int) -> Arrays:
    """Return inputs, a kernel and the outputs' cotangent, all positive, so that no sum cancels."""
    rng = np.random.default_rng(0)
    shapes = (channels, height, width, batch), (size, size, channels, features), (features, height, width, batch)
    return tuple(rng.uniform(0.5, 1.5, shape).astype(np.float32) for shape in shapes)


def convolved(
    inputs: jax.Array, kernel: jax.Array, cotangent: jax.Array, *, precision: Precision
) -> tuple[jax.Array, ...]:
    outputs, pull_back = jax.vjp(lambda inputs, kernel: convolve(inputs, kernel, precision), inputs, kernel)
    return outputs, *pull_back(cotangent)


def exact_convolution(*arrays: np.ndarray, precision: Precision) -> Arrays:
    """Return the convolution of rounded operands and its gradients for a rounded cotangent, in float64."""
    inputs, kernel, cotangent = (array.astype(DTYPES[precision]).astype(np.float64) for array in arrays)
    size, (height, width) = len(kernel), inputs.shape[1:3]
    edge = (size // 2, size // 2)
    padded = np.pad(inputs, [(0, 0), edge, edge, (0, 0)])
    outputs, of_padded, of_kernel = np.zeros_like(cotangent), np.zeros_like(padded), np.zeros_like(kernel)
    for row, column in np.ndindex(size, size):
        observed = np.s_[:, row : row + height, column : column + width]
        outputs += np.tensordot(kernel[row, column], padded[observed], (0, 0))
        of_padded[observed] += np.tensordot(kernel[row, column], cotangent, (1, 0))
        of_kernel[row, column] = np.tensordot(padded[observed], cotangent, ((1, 2, 3), (1, 2, 3)))
    return outputs, of_padded[:, edge[0] : edge[0] + height, edge[0] : edge[0] + width], of_kernel


@pytest.mark.parametrize(("precision", "shape"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_rounded_operands_in_a_compiled_loop(
    precision: Precision, shape: tuple[int, ...]
) -> None:
    """Those for inference alone too, which have another program."""
    arrays = operands(*shape)

    @jax.jit
    def loop(
        stop: jax.Array, inputs: jax.Array, kernel: jax.Array, cotangent: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        def body(_: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return jax.tree.map(jnp.add, totals, convolved(inputs, kernel, cotangent, precision=precision))

        zeros = tuple(map(jnp.zeros_like, (cotangent, inputs, kernel)))
        return jax.lax.fori_loop(0, stop, body, zeros), convolve_for_inference(inputs, kernel, precision)

    expected = exact_convolution(*arrays, precision=precision)
    result, for_inference = loop(np.int32(2), *arrays)
    assert_close(result, tuple(2 * array for array in expected))
    np.testing.assert_allclose(for_inference, expected[0], rtol=3e-6)


def pooled_by_max(inputs: jax.Array) -> jax.Array:
    channels, height, width, batch = inputs.shape
    whole = inputs[:, : height // 2 * 2, : width // 2 * 2]
    return jnp.max(whole.reshape(channels, height // 2, 2, width // 2, 2, batch), axis=(2, 4))


@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (1, 5, 7, 2), (3, 2, 3, 1)], ids=str)
def test_pooling_equals_the_maximum_and_ties_share_its_gradient(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 3, shape).astype(np.float32)  # of three values, so that most windows have ties
    cotangent = rng.normal(size=(shape[0], shape[1] // 2, shape[2] // 2, shape[3])).astype(np.float32)

    @jax.jit
    def run(inputs: jax.Array, cotangent: jax.Array) -> list[tuple[jax.Array, ...]]:
        pairs = [jax.vjp(function, inputs) for function in (max_pool, pooled_by_max)]
        return [(outputs, *pull_back(cotangent)) for outputs, pull_back in pairs]

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *run(inputs, cotangent))


@pytest.mark.parametrize(
    ("columns", "compiled"), [(16, 16), (17, 32), (24, 32), (40, 48), (47, 48), (48, 48), (67, 67)]
)
def test_no_product_has_a_width_at_which_processors_add_otherwise(columns: int, compiled: int) -> None:
    lhs, rhs = np.ones((5, 7), np.float32), np.arange(7.0 * columns, dtype=np.float32).reshape(7, columns)
    products = jax.jit(lambda lhs, rhs: (matmul(lhs, rhs, "float32"), contract(lhs, rhs.T, 1, 1))).trace(lhs, rhs)
    assert [eqn.outvars[0].aval.shape[1] for eqn in products.jaxpr.eqns if "dot" in str(eqn)] == [compiled] * 2
    for result in products.lower().compile()(lhs, rhs):
        np.testing.assert_allclose(result, lhs @ rhs, rtol=1e-6)
