"""An evaluation sums up predictions as scikit-learn does, and lists the mistakes, the worst first."""

import numpy as np
import pytest
import sklearn.metrics  # type: ignore[import-untyped]

from gradtrail.core.evaluate.metrics import EvaluateConfig, corrected_metrics, evaluate

RNG = np.random.default_rng(0)
PROBABILITIES = RNG.dirichlet(np.ones(4), 50).astype(np.float32)
LABELS = RNG.integers(0, 4, 50).astype(np.int32)
RESULT = evaluate(np.log(PROBABILITIES, dtype=np.float64), LABELS, temperature=0.5, calibration_bins=5)


def test_metrics_equal_scikit_learn() -> None:
    metrics, predicted = RESULT.metrics(), PROBABILITIES.argmax(axis=1)
    assert metrics["accuracy"] == sklearn.metrics.accuracy_score(LABELS, predicted)
    assert metrics["loss_uncalibrated"] == pytest.approx(sklearn.metrics.log_loss(LABELS, PROBABILITIES), rel=1e-6)
    squares = PROBABILITIES.astype(np.float64) ** 2  # softmax at half the temperature
    sharper = squares / squares.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(RESULT.probabilities, sharper, rtol=1e-6)
    assert metrics["loss"] == pytest.approx(sklearn.metrics.log_loss(LABELS, sharper), rel=1e-6)
    assert metrics["brier"] == pytest.approx(sklearn.metrics.brier_score_loss(LABELS, sharper, scale_by_half=False))
    assert metrics["f1_macro"] == pytest.approx(sklearn.metrics.f1_score(LABELS, predicted, average="macro"))
    recall = sklearn.metrics.recall_score(LABELS, predicted, average="macro")
    assert metrics["recall_macro"] == pytest.approx(recall)
    assert metrics["accuracy_low"] < metrics["accuracy"] < metrics["accuracy_high"]
    assert (metrics["num_examples"], metrics["num_mistakes"]) == (50, np.sum(predicted != LABELS))


def test_corrected_labels_make_a_second_accuracy_and_leave_the_first() -> None:
    predicted = PROBABILITIES.argmax(axis=1)
    corrected = LABELS.copy()
    corrected[RESULT.mistakes[:5]] = predicted[RESULT.mistakes[:5]]
    found = corrected_metrics(predicted, LABELS, corrected)
    assert found["accuracy_corrected_labels"] == sklearn.metrics.accuracy_score(corrected, predicted)
    assert found["accuracy_corrected_labels"] == pytest.approx(RESULT.metrics()["accuracy"] + 0.1)
    assert not set(found) & set(RESULT.metrics())
    assert corrected_metrics(predicted, LABELS, LABELS) == {}


def test_mistakes_are_the_wrong_ones_the_most_certain_first() -> None:
    assert set(RESULT.mistakes) == set(np.flatnonzero(RESULT.predicted != LABELS))
    assert np.all(np.diff(RESULT.probability[RESULT.mistakes]) <= 0)


def test_calibrating_changes_no_prediction() -> None:
    near = np.array([[0, 1e-7]], np.float32)
    result = evaluate(near, np.array([1]), temperature=20.0, calibration_bins=3)
    assert result.predicted.tolist() == [1]
    assert len(result.mistakes) == 0


def test_equal_mistakes_stand_in_order() -> None:
    same = np.tile(np.array([[1, 0]], np.float32), (6, 1))
    result = evaluate(same, np.array([1, 0, 1, 1, 0, 1]), temperature=1.0, calibration_bins=3)
    np.testing.assert_array_equal(result.mistakes, [0, 2, 3, 5])


def test_without_mistakes_every_figure_is_perfect() -> None:
    result = evaluate(1000 * np.eye(3, dtype=np.float32), np.arange(3), temperature=1.0, calibration_bins=3)
    metrics = result.metrics()
    assert len(result.mistakes) == 0
    assert [metrics[name] for name in ("accuracy", "f1_macro", "loss", "expected_calibration_error")] == [1, 1, 0, 0]


@pytest.mark.parametrize("key", ["batch_size", "calibration_bins", "num_mistakes"])
def test_counts_below_one_are_refused(key: str) -> None:
    values = {"batch_size": 1, "calibration_bins": 1, "num_mistakes": 1, key: 0}
    with pytest.raises(ValueError, match=f"^{key} must be at least 1"):
        EvaluateConfig(weights="final", **values)
