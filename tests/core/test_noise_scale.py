"""The noise scale against gradients drawn from a distribution whose noise scale is known."""

import numpy as np
import pytest

from gradtrail.core import noise_scale

SIZE, MEAN, SPREAD = 50, 0.3, 2.0  # of a gradient: G = MEAN in every entry, Σ = SPREAD² on the diagonal
TRACE, SQUARED_NORM = SIZE * SPREAD**2, SIZE * MEAN**2


def draw(count: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(MEAN, SPREAD, (count, SIZE))


@pytest.mark.parametrize(("small", "large"), [(1, 16), (8, 16), (4, 32)])
def test_two_batch_sizes_tell_trace_and_norm_without_bias(small: int, large: int) -> None:
    parts = draw(4000 * large).reshape(4000, large // small, small, SIZE).mean(axis=2)
    small_norm = np.sqrt(np.mean(np.sum(parts**2, axis=2), axis=1))
    large_norm = np.linalg.norm(parts.mean(axis=1), axis=1)
    trace, squared_norm = noise_scale.from_two_batch_sizes(small_norm, large_norm, small_size=small, large_size=large)
    assert np.mean(trace) == pytest.approx(TRACE, rel=0.02)
    assert np.mean(squared_norm) == pytest.approx(SQUARED_NORM, rel=0.1)


def test_over_training_is_the_ratio_of_means_in_each_window() -> None:
    trace, squared_norm = np.array([2.0, 4.0, 9.0, 3.0]), np.array([1.0, 2.0, 3.0, -1.0])
    np.testing.assert_allclose(noise_scale.over_training(trace, squared_norm, windows=2), [2.0, 6.0])
    assert np.isnan(noise_scale.over_training(trace, squared_norm, windows=4)[3]), "a norm that noise drowned"
    assert noise_scale.over_training(trace, squared_norm, windows=9).shape == (4,)
