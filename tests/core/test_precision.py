"""Low-precision products round their operands, never their sum."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradtrail.core.precision import DotGeneral

DIMENSIONS = (((1,), (0,)), ((), ()))


def operands(depth: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.uniform(0.5, 1.5, (4, depth)).astype(np.float32), rng.uniform(0.5, 1.5, (depth, 3)).astype(np.float32)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("precision", "dtype"), [("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)])
def test_products_accumulate_in_float32(precision: str, dtype: type, compiled: bool) -> None:
    left, right = operands(5000)  # in bfloat16 a sum of this length would be wrong by more than 1 %
    dot = DotGeneral(precision)

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return dot(left, right, DIMENSIONS)

    ours = (jax.jit(product) if compiled else product)(jnp.asarray(left), jnp.asarray(right))
    exact = left.astype(dtype).astype(np.float64) @ right.astype(dtype).astype(np.float64)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, exact, rtol=2e-5)


def test_bfloat16_rounds_the_operands() -> None:
    left, right = operands(1)
    ours = DotGeneral("bfloat16")(jnp.asarray(left), jnp.asarray(right), DIMENSIONS)
    assert np.max(np.abs(np.asarray(ours) / (left @ right) - 1)) > 1e-4
