"""Metrics of an evaluation against scikit-learn and plain loops."""

import numpy as np
import pytest
import sklearn.metrics  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.evaluate import calibration, metrics
from gradtrail.core.evaluate.metrics import corrected_metrics, evaluate

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
    result = corrected_metrics(predicted, LABELS, corrected)
    assert result["accuracy_corrected_labels"] == sklearn.metrics.accuracy_score(corrected, predicted)
    assert result["accuracy_corrected_labels"] == pytest.approx(RESULT.metrics()["accuracy"] + 0.1)
    assert not set(result) & set(RESULT.metrics())
    assert corrected_metrics(predicted, LABELS, LABELS) == {}


def test_mistakes_are_the_wrong_ones_the_most_certain_first() -> None:
    assert set(RESULT.mistakes) == set(np.flatnonzero(RESULT.predicted != LABELS))
    assert np.all(np.diff(RESULT.probability[RESULT.mistakes]) <= 0)


def test_calibrating_changes_no_prediction() -> None:
    near = np.array([[0, 1e-7]], np.float32)
    result = evaluate(near, np.array([1]), temperature=20.0, calibration_bins=3)
    assert result.predicted.tolist() == [1]
    assert len(result.mistakes) == 0


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)
CONFIDENCES = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30)


def reliability(confidence: np.ndarray, is_correct: np.ndarray, num_bins: int) -> calibration.Bins:
    bins = calibration.bins_of_equal_width(confidence, num_bins)
    return calibration.fill_bins(bins, confidence, is_correct, num_bins)


def columns(rows: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


@given(PAIRS)
def test_confusion_and_figures_of_classes_equal_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    labels, predicted = columns(pairs)
    confusion = metrics.confusion_matrix(labels, predicted, 4)
    np.testing.assert_array_equal(confusion, sklearn.metrics.confusion_matrix(labels, predicted, labels=range(4)))
    ours = metrics.per_class(confusion)
    theirs = sklearn.metrics.precision_recall_fscore_support(labels, predicted, labels=range(4), zero_division=0)
    for name, expected in zip(("precision", "recall", "f1"), theirs, strict=False):
        np.testing.assert_allclose(getattr(ours, name), expected, atol=1e-12, err_msg=name)


@given(CONFIDENCES, st.integers(1, 20))
def test_reliability_equals_a_loop(rows: list[tuple[float, bool]], num_bins: int) -> None:
    confidence, is_correct = columns(rows)
    bins = reliability(confidence, is_correct, num_bins)
    members: list[list[int]] = [[] for _ in range(num_bins)]
    for index, value in enumerate(confidence):
        members[min(int(value * num_bins), num_bins - 1)].append(index)
    error = 0.0
    for number, chosen in enumerate(members):
        assert bins.count[number] == len(chosen)
        if not chosen:
            assert np.isnan(bins.accuracy[number])
            assert np.isnan(bins.confidence[number])
            continue
        assert bins.accuracy[number] == pytest.approx(np.mean(is_correct[chosen]))
        assert bins.confidence[number] == pytest.approx(np.mean(confidence[chosen]))
        error += len(chosen) / len(rows) * abs(np.mean(is_correct[chosen]) - np.mean(confidence[chosen]))
    assert bins.expected_calibration_error == pytest.approx(error)


def test_certainty_falls_into_the_last_bin_and_an_edge_into_the_upper_one() -> None:
    bins = reliability(np.array([1.0, 0.5, 0.0]), np.array([True, False, True]), 2)
    np.testing.assert_array_equal(bins.count, [1, 2])
    assert bins.expected_calibration_error == pytest.approx((1 * 1 + 2 * abs(0.5 - 0.75)) / 3)
