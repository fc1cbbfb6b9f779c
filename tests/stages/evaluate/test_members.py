"""Members are evaluated alone, and as an ensemble by their mean probabilities; compared with NumPy and SciPy."""

from pathlib import Path

import numpy as np
import pytest
from factories import random_split
from scipy.special import softmax

from gradtrail.core.evaluate.calibration import fit_temperature
from gradtrail.core.evaluate.metrics import EvaluateConfig
from gradtrail.stages.evaluate import members
from gradtrail.stages.evaluate.members import Predictions

CONFIG = EvaluateConfig(weights="final", batch_size=4, calibration_bins=3, num_mistakes=5)
SPLITS = (random_split(30), random_split(40))


def predictions(seed: int) -> Predictions:
    rng = np.random.default_rng(seed)
    validation, test = (np.float32(2 * rng.normal(size=(len(split), 3))) for split in SPLITS)
    return Predictions(seed=seed, weights=Path(f"{seed}.safetensors"), epoch=2, validation=validation, test=test)


def test_ensemble_is_the_mean_of_the_probabilities_with_a_temperature_of_its_own() -> None:
    all_predictions = [predictions(seed) for seed in (0, 1, 2)]
    evaluation = members.evaluate(all_predictions, SPLITS, CONFIG)
    validation, mean = (
        np.mean([softmax(getattr(one, name), axis=1) for one in all_predictions], axis=0)
        for name in ("validation", "test")
    )
    assert evaluation.ensemble.temperature == pytest.approx(fit_temperature(np.log(validation), SPLITS[0].labels))
    np.testing.assert_array_equal(evaluation.ensemble.predicted, mean.argmax(axis=1))
    assert [one.temperature for one in evaluation.members] == [
        fit_temperature(one.validation, SPLITS[0].labels) for one in all_predictions
    ]
    agree = np.mean([one.test.argmax(axis=1) == mean.argmax(axis=1) for one in all_predictions], axis=0)
    np.testing.assert_allclose(evaluation.agreement(), agree)


def test_metrics_of_several_members_are_means_and_ensemble() -> None:
    all_predictions = [predictions(seed) for seed in (0, 1)]
    alone = members.evaluate(all_predictions[:1], SPLITS, CONFIG)
    assert alone.metrics(SPLITS[1]) == {"epoch": 2, **alone.ensemble.metrics()}
    both = members.evaluate(all_predictions, SPLITS, CONFIG)
    metrics = both.metrics(SPLITS[1])
    accuracies = [float(np.mean(one.test.argmax(axis=1) == SPLITS[1].labels)) for one in all_predictions]
    assert metrics["accuracy"] == pytest.approx(np.mean(accuracies))
    assert metrics["accuracy_sd"] == pytest.approx(np.std(accuracies, ddof=1))
    mean = np.mean([softmax(one.test, axis=1) for one in all_predictions], axis=0)
    assert metrics["ensemble_accuracy"] == np.mean(mean.argmax(axis=1) == SPLITS[1].labels)
    assert both.table(SPLITS[1])[["seed", "accuracy"]].to_numpy() == pytest.approx(
        np.array([[0, accuracies[0]], [1, accuracies[1]]])
    )
