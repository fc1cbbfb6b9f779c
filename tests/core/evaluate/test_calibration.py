"""One temperature makes probabilities as good as a temperature can, and scores say how good, with intervals."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from scipy.stats import norm

from gradtrail.core.evaluate import calibration


def drawn(num_examples: int, *, sharpness: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and labels that were drawn from them before their logits were multiplied by `sharpness`."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(num_examples, 5))
    labels = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    return softmax(sharpness * logits, axis=1).astype(np.float32), labels


@pytest.mark.parametrize("sharpness", [0.4, 1.0, 3.0])
def test_the_temperature_is_that_of_a_general_minimizer(sharpness: float) -> None:
    probabilities, labels = drawn(2000, sharpness=sharpness)

    def loss(temperature: float) -> float:
        logs = log_softmax(np.log(probabilities, dtype=np.float64) / temperature, axis=1)
        return -float(np.mean(logs[np.arange(len(labels)), labels]))

    best = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    found = calibration.fit_temperature(calibration.logits_of(probabilities), labels)
    assert found == pytest.approx(best.x, rel=1e-5)
    assert found == pytest.approx(sharpness, rel=0.1)  # which is what made the labels improbable
    mean = np.mean(calibration.cross_entropy(probabilities, labels, found))
    assert mean == pytest.approx(best.fun, rel=1e-9)


def test_a_temperature_stays_within_its_bounds() -> None:
    certain, labels = np.array([[2.0, 0.0], [0.0, 1.4]]), np.array([0, 1])
    assert calibration.fit_temperature(certain, labels) == pytest.approx(calibration.LOWEST)
    assert calibration.fit_temperature(certain, 1 - labels) == pytest.approx(calibration.HIGHEST)


def test_calibrating_keeps_the_order_of_classes_and_temperature_1_keeps_all() -> None:
    probabilities, _ = drawn(100, sharpness=2.0)
    np.testing.assert_allclose(calibration.calibrate(probabilities, 1.0), probabilities, rtol=1e-5)
    warm = calibration.calibrate(probabilities, 1.7)
    np.testing.assert_array_equal(np.argsort(warm, axis=1), np.argsort(probabilities, axis=1))
    np.testing.assert_allclose(warm.sum(axis=1), 1, rtol=1e-6)


def test_a_probability_that_underflowed_has_a_finite_loss() -> None:
    loss = calibration.cross_entropy(np.array([[1, 0]], np.float32), np.array([1]), 0.5)
    assert loss == pytest.approx(2 * 149 * np.log(2))


def test_brier_score_equals_its_definition() -> None:
    probabilities, labels = drawn(20, sharpness=1.0)
    expected = [np.sum((row - np.eye(5)[label]) ** 2) for row, label in zip(probabilities, labels, strict=True)]
    np.testing.assert_allclose(calibration.brier_score(probabilities, labels), expected, rtol=1e-6)


def test_bins_of_equal_mass_have_equally_many_in_order_of_confidence() -> None:
    confidence = np.random.default_rng(0).uniform(size=103)
    bins = calibration.bins_of_equal_mass(confidence, 10)
    assert sorted(set(np.bincount(bins))) == [10, 11]
    np.testing.assert_array_equal(bins[np.argsort(confidence)], np.sort(bins))
    assert calibration.bins_of_equal_mass(confidence[:3], 10).max() == 2


def test_scores_and_their_intervals() -> None:
    probabilities, labels = drawn(4000, sharpness=3.0)
    loss = calibration.cross_entropy(probabilities, labels, 1.0)
    found = calibration.score(probabilities, loss, labels, 10)
    assert found["loss"].value == pytest.approx(np.mean(loss))
    half = norm.ppf(0.975) * np.std(loss) / np.sqrt(len(loss))  # the bootstrap of a mean is nearly normal
    assert found["loss"].low == pytest.approx(np.mean(loss) - half, abs=0.15 * half)
    assert found["loss"].high == pytest.approx(np.mean(loss) + half, abs=0.15 * half)
    confidence, is_correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    by_hand = 0.0
    for number in range(10):
        chosen = (confidence >= number / 10) & (confidence < (number + 1) / 10)
        if chosen.any():
            by_hand += np.mean(chosen) * abs(confidence[chosen].mean() - is_correct[chosen].mean())
    assert found["expected_calibration_error"].value == pytest.approx(by_hand, rel=1e-5)
    for each in found.values():
        assert each.low <= each.value <= each.high


def test_the_interval_of_a_calibration_error_is_not_biased_upwards() -> None:
    """Of calibrated probabilities the error is that of chance, which each resample of a plain bootstrap exceeds."""
    probabilities, labels = drawn(2000, sharpness=1.0)
    found = calibration.score(probabilities, np.zeros(2000), labels, 10)["expected_calibration_error"]
    assert found.low < found.value / 4  # the truth is 0
