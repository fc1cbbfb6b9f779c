"""Low-precision products round their operands, never their sum, forward and backward, wherever they are compiled."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradtrail.core.nn.precision import Precision, matmul, rounded, transposed

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SHAPES = [(1, 1, 1), (1, 7, 10), (33, 5, 1), (13, 27, 10)]  # rows, inner, columns
LONG = [(3, 5000, 4), (5000, 3, 4), (3, 4, 5000)]  # each of the three products has a long sum in one of them
TRANSPOSED = [(1, 1), (1, 5), (5, 1), (3, 7)]
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


def assert_close(found: tuple, expected: tuple) -> None:
    for name, ours, theirs in zip(("product", "of lhs", "of rhs"), found, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("precision", DTYPES)
def test_long_sums_are_in_float32_forward_and_backward(precision: Precision, shape: tuple[int, int, int]) -> None:
    given = operands(*shape)
    assert_close(jax.jit(functools.partial(computed, precision=precision))(*given), exact(*given, precision))


def test_step_by_step_it_is_the_same_as_compiled() -> None:
    given = operands(5000, 3, 4)
    assert_close(computed(*map(jnp.asarray, given), precision="bfloat16"), exact(*given, "bfloat16"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_transposed_operands_of_any_shape_work_in_a_compiled_loop(
    precision: Precision, shape: tuple[int, int, int]
) -> None:
    given = operands(*shape, batch=(3,))

    @jax.jit
    def loop(stop: jax.Array, *across: jax.Array) -> tuple[jax.Array, ...]:
        def body(index: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            found = computed(*(array[index].T for array in across), precision=precision)
            return tuple(total + array for total, array in zip(totals, found, strict=True))

        zeros = tuple(jnp.zeros(array.shape[1:]) for array in (given[2], given[0], given[1]))
        return jax.lax.fori_loop(0, stop, body, zeros)

    across = (array.swapaxes(-1, -2).copy() for array in given)
    assert_close(loop(np.int32(3), *across), tuple(array.sum(axis=0) for array in exact(*given, precision)))


@pytest.mark.parametrize("precision", DTYPES)
def test_mapped_over_examples_it_is_the_product_of_each(precision: Precision) -> None:
    given = operands(1, 6, 10, batch=(5,))
    mapped = jax.jit(jax.vmap(functools.partial(computed, precision=precision)))
    assert_close(mapped(*given), exact(*given, precision))


@pytest.mark.parametrize("precision", DTYPES)
def test_weights_in_common_have_a_gradient_of_each_example(precision: Precision) -> None:
    inputs, weights, cotangent = operands(5, 6, 10)
    each = jax.jit(jax.vmap(functools.partial(computed, precision=precision), in_axes=(0, None, 0)))
    examples = inputs[:, None], weights, cotangent[:, None]
    found = each(*examples)
    assert_close(found, exact(*examples, precision))
    np.testing.assert_allclose(np.sum(found[2], axis=0), exact(inputs, weights, cotangent, precision)[2], rtol=2e-5)


@pytest.mark.parametrize("precision", DTYPES)
def test_rounded_is_what_a_product_sees_of_an_operand(precision: Precision) -> None:
    lhs, _, _ = operands(5, 4, 1)
    found = jax.jit(rounded, static_argnums=1)(lhs, precision)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, lhs.astype(DTYPES[precision]).astype(np.float32))


def test_a_gradient_that_float16_cannot_hold_is_infinite_and_not_wrong() -> None:
    one = jnp.ones((1, 1))
    _, of_lhs, of_rhs = computed(one, one, jnp.full((1, 1), 1e5), precision="float16")
    assert np.isposinf(of_lhs)
    assert np.isposinf(of_rhs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_transposed_is_the_transpose_of_one_matrix_and_of_each(dtype: type) -> None:
    matrices = [np.arange(rows * columns).reshape(rows, columns).astype(dtype) for rows, columns in TRANSPOSED]
    stack = np.arange(42).reshape(2, 3, 7).astype(dtype)
    found, mapped = jax.jit(lambda matrices, stack: (jax.tree.map(transposed, matrices), jax.vmap(transposed)(stack)))(
        matrices, stack
    )
    for ours, matrix in zip([*found, *mapped], [*matrices, *stack], strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, matrix.T)
