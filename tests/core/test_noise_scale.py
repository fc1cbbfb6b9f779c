"""The noise scale against gradients drawn from a distribution whose noise scale is known."""

import numpy as np
import pytest

from gradtrail.core import noise_scale

SIZE, MEAN, SPREAD = 50, 0.3, 2.0  # of a gradient: G = MEAN in every entry, Σ = SPREAD² on the diagonal
TRACE, SQUARED_NORM = SIZE * SPREAD**2, SIZE * MEAN**2


def draw(count: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(MEAN, SPREAD, (count, SIZE))


@pytest.mark.parametrize(("small", "large"), [(1, 16), (8, 16), (4, 32)])
def test_estimates_from_two_batch_sizes_are_unbiased(small: int, large: int) -> None:
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


def chunked(gradients: np.ndarray, classes: np.ndarray, *, per_class: int = 10) -> dict[str, np.ndarray]:
    """Sums over chunks of examples of one class, and what else `from_chunks` takes."""
    parts = [
        (label, part) for label in np.unique(classes) for part in np.array_split(gradients[classes == label], per_class)
    ]
    sums = np.stack([part.sum(axis=0) for _, part in parts])
    return {
        "products": sums @ sums.T,
        "squares": np.array([np.sum(part**2) for _, part in parts]),
        "sizes": np.array([len(part) for _, part in parts]),
        "strata": np.array([label for label, _ in parts]),
    }


def estimate(count: int, *, seed: int = 0, **overrides: np.ndarray) -> noise_scale.NoiseScale:
    parts = chunked(draw(count, seed=seed), np.arange(count) % 4) | overrides
    return noise_scale.from_chunks(**parts, samples=400, seed=0)


def test_estimate_is_unbiased_and_interval_has_its_coverage() -> None:
    runs = [estimate(400, seed=seed) for seed in range(200)]
    assert np.mean([run.squared_norm for run in runs]) == pytest.approx(SQUARED_NORM, rel=0.02)
    assert np.mean([run.trace for run in runs]) == pytest.approx(TRACE, rel=0.02)
    held = np.mean([run.low <= TRACE / SQUARED_NORM <= run.high for run in runs])
    assert 0.88 <= held <= 1, "95 % asked for; 10 chunks a class make the bootstrap a little bold"


def test_a_mean_gradient_drowned_by_noise_makes_the_scale_infinite() -> None:
    gradients = draw(40) - draw(40).mean(axis=0)
    result = noise_scale.from_chunks(**chunked(gradients, np.zeros(40, int)), samples=100, seed=0)
    assert result.squared_norm < 0
    assert result.value == result.high == np.inf
