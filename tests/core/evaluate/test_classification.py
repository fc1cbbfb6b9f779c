"""Figures of a classifier against scikit-learn, SciPy and plain loops."""

import numpy as np
import pytest
import sklearn.metrics  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.evaluate import calibration, metrics

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)
CONFIDENCES = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30)


def reliability(confidence: np.ndarray, is_correct: np.ndarray, num_bins: int) -> calibration.Bins:
    bins = calibration.bins_of_equal_width(confidence, num_bins)
    return calibration.in_bins(bins, confidence, is_correct, num_bins)


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


def test_float32_probabilities_of_one_are_taken() -> None:
    bins = reliability(np.ones(3, np.float32), np.ones(3, bool), 15)
    assert bins.count[-1] == 3
    assert bins.expected_calibration_error == 0
