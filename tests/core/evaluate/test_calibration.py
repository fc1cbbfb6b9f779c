"""One temperature makes probabilities as good as a temperature can, and scores say how good, with intervals."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp, softmax
from scipy.stats import norm

from gradtrail.core.evaluate import calibration


def drawn(num_examples: int, *, sharpness: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits, multiplied by `sharpness`, and labels that were drawn before that."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(num_examples, 5))
    labels = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    return (sharpness * logits).astype(np.float32), labels


def loss_of(logits: np.ndarray, labels: np.ndarray, temperature: float) -> np.ndarray:
    return -log_softmax(logits.astype(np.float64) / temperature, axis=1)[np.arange(len(labels)), labels]


@pytest.mark.parametrize("sharpness", [0.4, 1.0, 3.0])
def test_the_temperature_is_that_of_a_general_minimizer(sharpness: float) -> None:
    logits, labels = drawn(2000, sharpness=sharpness)

    def loss(temperature: float) -> float:
        return float(np.mean(loss_of(logits, labels, temperature)))

    best = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    result = calibration.fit_temperature(logits, labels)
    assert result == pytest.approx(best.x, rel=1e-5)
    assert result == pytest.approx(sharpness, rel=0.1)  # which is what made the labels improbable
    assert loss(result) == pytest.approx(best.fun, rel=1e-9)


def test_a_temperature_stays_within_its_bounds() -> None:
    certain, labels = np.array([[2.0, 0.0], [0.0, 1.4]]), np.array([0, 1])
    assert calibration.fit_temperature(certain, labels) == pytest.approx(calibration.LOWEST)
    assert calibration.fit_temperature(certain, 1 - labels) == pytest.approx(calibration.HIGHEST)


def test_the_temperature_counts_how_wrong_a_confident_mistake_is() -> None:
    """The probability of its label underflows in float32; from a smallest one the temperature would be 6.9."""
    logits, labels = np.array([[300, 0], *[[20, 0]] * 100], np.float32), np.array([1, *[0] * 100])

    def loss(temperature: float) -> float:
        return float(np.mean(loss_of(logits, labels, temperature)))

    best = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    assert calibration.fit_temperature(logits, labels) == pytest.approx(best.x, rel=1e-5)
    assert best.x == pytest.approx(11.53, rel=1e-3)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_mean_softmax_is_scipys_and_its_smallest_parts_do_not_underflow(scale: float) -> None:
    logits = scale * np.random.default_rng(0).normal(size=(3, 50, 4))
    expected = logsumexp(log_softmax(logits, axis=2), axis=0) - np.log(3)
    np.testing.assert_allclose(calibration.log_mean_softmax(logits), expected, rtol=1e-12, atol=1e-12)
    assert np.isfinite(expected).all()


def test_bins_of_equal_mass_have_equally_many_in_order_of_confidence() -> None:
    confidence = np.random.default_rng(0).uniform(size=103)
    bins = calibration.bins_of_equal_mass(confidence, 10)
    assert sorted(set(np.bincount(bins))) == [10, 11]
    np.testing.assert_array_equal(bins[np.argsort(confidence)], np.sort(bins))
    assert calibration.bins_of_equal_mass(confidence[:3], 10).max() == 2


def test_scores_and_their_intervals() -> None:
    logits, labels = drawn(4000, sharpness=3.0)
    probabilities, loss = softmax(logits, axis=1), loss_of(logits, labels, 1.0)
    result = calibration.score(probabilities, loss, labels, 10)
    assert result["loss"].value == pytest.approx(np.mean(loss))
    half = norm.ppf(0.975) * np.std(loss) / np.sqrt(len(loss))  # the bootstrap of a mean is nearly normal
    assert result["loss"].low == pytest.approx(np.mean(loss) - half, abs=0.15 * half)
    assert result["loss"].high == pytest.approx(np.mean(loss) + half, abs=0.15 * half)
    confidence, is_correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    by_hand = 0.0
    for number in range(10):
        chosen = (confidence >= number / 10) & (confidence < (number + 1) / 10)
        if chosen.any():
            by_hand += np.mean(chosen) * abs(confidence[chosen].mean() - is_correct[chosen].mean())
    assert result["expected_calibration_error"].value == pytest.approx(by_hand, rel=1e-5)
    for item in result.values():
        assert item.low <= item.value <= item.high


def test_the_interval_of_a_calibration_error_is_not_biased_upwards() -> None:
    """Of calibrated probabilities the error is that of chance, which each resample of a plain bootstrap exceeds."""
    logits, labels = drawn(2000, sharpness=1.0)
    result = calibration.score(softmax(logits, axis=1), np.zeros(2000), labels, 10)["expected_calibration_error"]
    assert result.low < result.value / 4  # the truth is 0
