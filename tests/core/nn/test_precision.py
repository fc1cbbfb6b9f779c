"""Low-precision products round their operands, never their sum, forward and backward, wherever they are compiled."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradtrail.core.nn.arithmetic import Precision, matmul

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SHAPES = [(1, 1, 1), (1, 7, 10), (33, 5, 1), (13, 27, 10)]  # rows, inner, columns
LONG = [(3, 5000, 4), (5000, 3, 4), (3, 4, 5000)]  # each of the three products has a long sum in one of them
Operands = tuple[np.ndarray, np.ndarray, np.ndarray]


def operands(rows: int, inner: int, columns: int, *, batch: tuple[int, ...] = ()) -> Operands:
    """Return two factors and the product's cotangent, all positive: a sum grows, and with it what rounding it costs."""
    rng = np.random.default_rng(0)
    shapes = (rows, inner), (inner, columns), (rows, columns)
    lhs, rhs, cotangent = (rng.uniform(0.5, 1.5, (*batch, *shape)).astype(np.float32) for shape in shapes)
    return lhs, rhs, cotangent


def exact(lhs: np.ndarray, rhs: np.ndarray, cotangent: np.ndarray, precision: Precision) -> Operands:
    """Return the product and both gradients of rounded operands, in float64."""
    lhs, rhs, cotangent = (array.astype(DTYPES[precision]).astype(np.float64) for array in (lhs, rhs, cotangent))
    return lhs @ rhs, cotangent @ rhs.swapaxes(-1, -2), lhs.swapaxes(-1, -2) @ cotangent


def computed(lhs: jax.Array, rhs: jax.Array, cotangent: jax.Array, *, precision: Precision) -> tuple[jax.Array, ...]:
    product, pull_back = jax.vjp(lambda lhs, rhs: matmul(lhs, rhs, precision), lhs, rhs)
    return product, *pull_back(cotangent)


def assert_close(result: tuple, expected: tuple) -> None:
    for name, ours, theirs in zip(("product", "of lhs", "of rhs"), result, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("precision", DTYPES)
def test_long_sums_are_in_float32_forward_and_backward(precision: Precision, shape: tuple[int, int, int]) -> None:
    inputs = operands(*shape)
    assert_close(jax.jit(functools.partial(computed, precision=precision))(*inputs), exact(*inputs, precision))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_transposed_operands_of_any_shape_work_in_a_compiled_loop(
    precision: Precision, shape: tuple[int, int, int]
) -> None:
    inputs = operands(*shape, batch=(3,))

    @jax.jit
    def loop(stop: jax.Array, *across: jax.Array) -> tuple[jax.Array, ...]:
        def body(index: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            result = computed(*(array[index].T for array in across), precision=precision)
            return tuple(total + array for total, array in zip(totals, result, strict=True))

        zeros = tuple(jnp.zeros(array.shape[1:]) for array in (inputs[2], inputs[0], inputs[1]))
        return jax.lax.fori_loop(0, stop, body, zeros)

    across = (array.swapaxes(-1, -2).copy() for array in inputs)
    assert_close(loop(np.int32(3), *across), tuple(array.sum(axis=0) for array in exact(*inputs, precision)))


@pytest.mark.parametrize("precision", DTYPES)
def test_shared_weights_have_per_example_gradients(precision: Precision) -> None:
    inputs, weights, cotangent = operands(5, 6, 10)
    item = jax.jit(jax.vmap(functools.partial(computed, precision=precision), in_axes=(0, None, 0)))
    examples = inputs[:, None], weights, cotangent[:, None]
    result = item(*examples)
    assert_close(result, exact(*examples, precision))
    np.testing.assert_allclose(np.sum(result[2], axis=0), exact(inputs, weights, cotangent, precision)[2], rtol=2e-5)


def test_a_gradient_that_float16_cannot_hold_is_infinite_and_not_wrong() -> None:
    one = jnp.ones((1, 1))
    _, of_lhs, of_rhs = computed(one, one, jnp.full((1, 1), 1e5), precision="float16")
    assert np.isposinf(of_lhs)
    assert np.isposinf(of_rhs)
