from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.dialect_peers import DIALECTS, Task, Training, make_batches
from benchmarks.dialects import PROGRAMS, count_lines, ratio_to_raw

TASK = Task(seed=0, batch_size=8, steps=4)


@pytest.fixture(scope="module", autouse=True)
def _plain_jax() -> Any:
    """The programs promote ranks and dtypes as JAX does by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def weights_by_shape(training: Training) -> dict[tuple[int, ...], np.ndarray]:
    """Return the weights as the raw program stores them."""
    params = getattr(training.state, "params", None) or training.state[0]
    stored = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    return {weights.shape: weights for leaf in stored for weights in (leaf, leaf.T)}


@pytest.fixture(scope="module")
def raw_losses() -> tuple[np.ndarray, dict[tuple[int, ...], np.ndarray]]:
    training, batches = Training("raw"), make_batches(TASK)
    losses = [training.run_steps(*batches), training.run_epoch(*batches)]
    return np.stack(losses), weights_by_shape(training)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS[1:])
def test_dialects_agree_to_rounding(dialect: str, raw_losses: Any) -> None:
    training, batches = Training(dialect), make_batches(TASK)
    losses = np.stack([training.run_steps(*batches), training.run_epoch(*batches)])
    expected_losses, expected_weights = raw_losses
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    weights = weights_by_shape(training)
    assert weights.keys() == expected_weights.keys()
    for shape, expected in expected_weights.items():
        np.testing.assert_allclose(weights[shape], expected, atol=1e-5)


def test_lines_are_counted_without_docstring_comments_and_blanks() -> None:
    assert count_lines('"""Two\nlines."""\n\nimport jax\n\n# why\nx = (  # here\n    1\n)\n') == 4
    assert all(20 < count_lines((PROGRAMS / f"{dialect}.py").read_text()) < 60 for dialect in DIALECTS)


def test_ratio_is_that_of_the_medians_of_processes() -> None:
    rounds = [{"raw": {"step": 1.0}, "nnx": {"step": seconds}} for seconds in (2.0, 2.0, 50.0)]
    slower = [{"raw": {"step": 1.0}, "nnx": {"step": 2.2}}]
    ratio = ratio_to_raw([{"step_seconds": rounds}, {"step_seconds": slower}, {"step_seconds": rounds}], "nnx", "step")
    assert ratio["low"] < 2.0 < ratio["ratio"] < 2.2 < ratio["high"]
    assert ratio["ratio"] == pytest.approx((2.0 * 2.0 * 2.2) ** (1 / 3))
