"""Metrics of an evaluation against scikit-learn and plain loops; the temperature against a general minimizer."""

import numpy as np
import pytest
import sklearn.metrics  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp, softmax
from scipy.stats import norm

from gradtrail.core import evaluate
from gradtrail.core.evaluate import evaluate_logits

RNG = np.random.default_rng(0)
PROBABILITIES = RNG.dirichlet(np.ones(4), 50).astype(np.float32)
LABELS = RNG.integers(0, 4, 50).astype(np.int32)
RESULT = evaluate_logits(np.log(PROBABILITIES, dtype=np.float64), LABELS, temperature=0.5, calibration_bins=5)


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


def unequal(num_examples: int, num_classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities, many of them equal, and labels of classes from rare to frequent, each at least once."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(num_classes), rng.integers(0, rng.integers(1, num_classes + 1, num_examples))])
    probabilities = rng.integers(1, 5, (len(labels), num_classes)) + 2 * np.eye(num_classes, dtype=int)[labels]
    return probabilities / probabilities.sum(axis=1, keepdims=True), labels


@pytest.mark.parametrize("num_classes", [2, 3, 9, 12])
@pytest.mark.parametrize("seed", [0, 1])
def test_metrics_of_unequal_classes_equal_scikit_learn(num_classes: int, seed: int) -> None:
    probabilities, labels = unequal(150, num_classes, seed)
    result = evaluate_logits(np.log(probabilities), labels, temperature=1.0, calibration_bins=5)
    metrics, shown = result.metrics(), result.probabilities.astype(np.float64)
    predicted = probabilities.argmax(axis=1)
    balanced = sklearn.metrics.balanced_accuracy_score(labels, predicted)
    assert metrics["balanced_accuracy"] == pytest.approx(balanced)
    assert metrics["balanced_accuracy_low"] < balanced < metrics["balanced_accuracy_high"]
    assert metrics["f1_macro"] == pytest.approx(sklearn.metrics.f1_score(labels, predicted, average="macro"))
    areas = [sklearn.metrics.roc_auc_score(labels == label, shown[:, label]) for label in range(num_classes)]
    np.testing.assert_allclose(result.per_class["auroc"], areas, rtol=1e-12)
    assert metrics["auroc_macro"] == pytest.approx(np.mean(areas))
    assert ("top_5_accuracy" in metrics) == (num_classes > 10)
    if num_classes > 10:  # of equal ones scikit-learn takes the last, here it is the first, as argmax does
        backwards = sklearn.metrics.top_k_accuracy_score(num_classes - 1 - labels, shown[:, ::-1], k=5)
        assert metrics["top_5_accuracy"] == pytest.approx(backwards)
        assert metrics["top_5_accuracy_low"] < backwards < metrics["top_5_accuracy_high"]


def test_recall_of_a_class_of_three_has_a_wide_interval() -> None:
    labels = np.array([0] * 100 + [1] * 3)
    result = evaluate_logits(4 * np.eye(4)[labels], labels, temperature=1.0, calibration_bins=5)
    assert result.per_class["recall"][:2].tolist() == [1, 1]
    np.testing.assert_allclose(result.per_class["recall_low"][:2], [0.963, 0.438], atol=1e-3)
    assert result.metrics()["balanced_accuracy_low"] == pytest.approx(0.718, abs=1e-3)
    assert np.isnan(result.per_class["recall_low"][2:]).all(), "a class without examples has none"


@pytest.mark.parametrize(("counts", "is_there"), [((2, 3, 0), False), ((20, 0, 31), True), ((7, 0, 0), False)])
def test_balanced_accuracy_is_there_if_a_class_has_more_than_one_and_a_half_times_the_examples_of_another(
    counts: tuple[int, ...], is_there: bool
) -> None:
    labels = np.repeat(np.arange(3), counts)
    result = evaluate_logits(np.zeros((len(labels), 3)), labels, temperature=1.0, calibration_bins=5)
    assert ("balanced_accuracy" in result.metrics()) == is_there
    assert ("auroc_macro" in result.metrics()) == (np.count_nonzero(counts) > 1), "of one class there is none"


def test_the_interval_of_mean_f1_is_that_of_resampled_examples() -> None:
    """Near 1, where it is not symmetric."""
    labels, rng = np.repeat(np.arange(3), (8, 40, 200)), np.random.default_rng(1)
    predicted, draws = labels.copy(), []
    predicted[[0, 8, 9, 48, 49, 50]] = [1, 2, 2, 0, 1, 1]
    for _ in range(1000):
        rows = rng.integers(len(labels), size=len(labels))
        present = np.unique(labels[rows])
        f1 = sklearn.metrics.f1_score(labels[rows], predicted[rows], labels=present, average="macro")
        draws.append(f1)
    result = evaluate_logits(np.eye(3)[predicted], labels, temperature=1.0, calibration_bins=5).f1_macro
    low, high = np.quantile(draws, [0.025, 0.975])
    assert high - result.value < 0.7 * (result.value - low)
    assert (result.low, result.high) == pytest.approx((low, high), abs=0.08 * (high - low))


def test_mistakes_are_the_wrong_ones_the_most_certain_first() -> None:
    assert set(RESULT.mistakes) == set(np.flatnonzero(RESULT.predicted != LABELS))
    assert np.all(np.diff(RESULT.probability[RESULT.mistakes]) <= 0)


def test_calibrating_changes_no_prediction() -> None:
    near = np.array([[0, 1e-7]], np.float32)
    result = evaluate_logits(near, np.array([1]), temperature=20.0, calibration_bins=3)
    assert result.predicted.tolist() == [1]
    assert len(result.mistakes) == 0


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)
CONFIDENCES = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30)


def columns(rows: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


@given(PAIRS)
def test_confusion_and_metrics_of_classes_equal_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    labels, predicted = columns(pairs)
    result = evaluate_logits(np.eye(4)[predicted], labels, temperature=1.0, calibration_bins=3)
    expected = sklearn.metrics.confusion_matrix(labels, predicted, labels=range(4))
    np.testing.assert_array_equal(result.confusion, expected)
    present = np.unique(labels)
    theirs = sklearn.metrics.precision_recall_fscore_support(labels, predicted, labels=present, zero_division=0)
    for name, values in zip(("precision", "recall", "f1"), theirs, strict=False):
        np.testing.assert_allclose(result.per_class[name][present], values, atol=1e-12, err_msg=name)
        assert np.isnan(np.delete(result.per_class[name], present)).all(), "a class without examples has none"
        assert result.metrics()[f"{name}_macro"] == pytest.approx(np.mean(values), abs=1e-12)


@given(CONFIDENCES, st.integers(1, 20))
def test_reliability_equals_a_loop(rows: list[tuple[float, bool]], num_bins: int) -> None:
    confidence, is_correct = columns(rows)
    bins = evaluate.fill_bins(confidence, is_correct, num_bins)
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
    result = evaluate.fit_temperature(logits, labels)
    assert result == pytest.approx(best.x, rel=1e-5)
    assert result == pytest.approx(sharpness, rel=0.1)  # which is what made the labels improbable
    assert loss(result) == pytest.approx(best.fun, rel=1e-9)


def test_a_temperature_stays_within_its_bounds() -> None:
    certain, labels = np.array([[2.0, 0.0], [0.0, 1.4]]), np.array([0, 1])
    assert evaluate.fit_temperature(certain, labels) == pytest.approx(evaluate.LOWEST)
    assert evaluate.fit_temperature(certain, 1 - labels) == pytest.approx(evaluate.HIGHEST)


def test_the_temperature_counts_how_wrong_a_confident_mistake_is() -> None:
    """The probability of its label underflows in float32; from a smallest one the temperature would be 6.9."""
    logits, labels = np.array([[300, 0], *[[20, 0]] * 100], np.float32), np.array([1, *[0] * 100])

    def loss(temperature: float) -> float:
        return float(np.mean(loss_of(logits, labels, temperature)))

    best = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    assert evaluate.fit_temperature(logits, labels) == pytest.approx(best.x, rel=1e-5)
    assert best.x == pytest.approx(11.53, rel=1e-3)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_mean_softmax_is_scipys_and_its_smallest_parts_do_not_underflow(scale: float) -> None:
    logits = scale * np.random.default_rng(0).normal(size=(3, 50, 4))
    expected = logsumexp(log_softmax(logits, axis=2), axis=0) - np.log(3)
    np.testing.assert_allclose(evaluate.log_mean_softmax(logits), expected, rtol=1e-12, atol=1e-12)
    assert np.isfinite(expected).all()


def test_bins_of_equal_mass_have_equally_many_in_order_of_confidence() -> None:
    confidence = np.random.default_rng(0).uniform(size=103)
    bins = evaluate.bins_of_equal_mass(confidence, 10)
    assert sorted(set(np.bincount(bins))) == [10, 11]
    np.testing.assert_array_equal(bins[np.argsort(confidence)], np.sort(bins))
    assert evaluate.bins_of_equal_mass(confidence[:3], 10).max() == 2


def test_scores_and_their_intervals() -> None:
    logits, labels = drawn(4000, sharpness=3.0)
    probabilities, loss = softmax(logits, axis=1), loss_of(logits, labels, 1.0)
    scorer = evaluate.scorer(probabilities, loss, labels, 10)
    result, same = evaluate.score_intervals([scorer, scorer], len(labels))
    assert result == same, "of the same resamples"
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
    scorer = evaluate.scorer(softmax(logits, axis=1), np.zeros(2000), labels, 10)
    result = evaluate.score_intervals([scorer], 2000)[0]["expected_calibration_error"]
    assert result.low < result.value / 4  # the truth is 0
