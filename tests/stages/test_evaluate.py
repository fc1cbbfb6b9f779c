"""Members are evaluated alone and as an ensemble, as by NumPy and SciPy; tables have every prediction."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factories import random_split
from scipy.special import softmax

from gradtrail.core.evaluate import EvaluateConfig, Evaluation, evaluate_logits, fit_temperature
from gradtrail.stages import evaluate
from gradtrail.stages.evaluate import MembersEvaluation, Predictions

CONFIG = EvaluateConfig(weights="final", batch_size=4, calibration_bins=3, num_mistakes=5)
SPLITS = (random_split(30), random_split(40))


def predictions(seed: int) -> Predictions:
    rng = np.random.default_rng(seed)
    validation, test = (np.float32(2 * rng.normal(size=(len(split), 3))) for split in SPLITS)
    return Predictions(seed=seed, weights=Path(f"{seed}.safetensors"), epoch=2, validation=validation, test=test)


def test_ensemble_is_the_mean_of_the_probabilities_with_a_temperature_of_its_own() -> None:
    all_predictions = [predictions(seed) for seed in (0, 1, 2)]
    evaluation = evaluate.evaluate(all_predictions, SPLITS, CONFIG)
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
    alone = evaluate.evaluate(all_predictions[:1], SPLITS, CONFIG)
    assert alone.metrics(SPLITS[1]) == {"epoch": 2, **alone.ensemble.metrics()}
    both = evaluate.evaluate(all_predictions, SPLITS, CONFIG)
    metrics = both.metrics(SPLITS[1])
    accuracies = [float(np.mean(one.test.argmax(axis=1) == SPLITS[1].labels)) for one in all_predictions]
    assert metrics["accuracy"] == pytest.approx(np.mean(accuracies))
    assert metrics["accuracy_sd"] == pytest.approx(np.std(accuracies, ddof=1))
    mean = np.mean([softmax(one.test, axis=1) for one in all_predictions], axis=0)
    assert metrics["ensemble_accuracy"] == np.mean(mean.argmax(axis=1) == SPLITS[1].labels)
    assert both.table(SPLITS[1])[["seed", "accuracy"]].to_numpy() == pytest.approx(
        np.array([[0, accuracies[0]], [1, accuracies[1]]])
    )


def test_corrected_labels_make_a_second_accuracy_and_leave_the_first() -> None:
    one, (validation, test) = predictions(0), SPLITS
    predicted = one.test.argmax(axis=1).astype(np.int32)
    corrected = dataclasses.replace(test, corrected_labels=predicted)
    before = evaluate.evaluate([one], SPLITS, CONFIG).metrics(test)
    after = evaluate.evaluate([one], (validation, corrected), CONFIG).metrics(corrected)
    assert after["accuracy_corrected_labels"] == 1.0
    assert {key: value for key, value in after.items() if not key.startswith("accuracy_corrected")} == before


def evaluation(num_examples: int, num_classes: int = 3, *, perfect: bool = False) -> Evaluation:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(num_classes), num_examples).astype(np.float32)
    wrong = (probabilities.argmax(axis=1) + 1) % num_classes
    labels = (probabilities.argmax(axis=1) if perfect else wrong).astype(np.int32)
    return evaluate_logits(np.log(probabilities), labels, temperature=2.0, calibration_bins=3)


def test_tables_have_every_prediction_and_as_many_mistakes_as_asked_for(tmp_path: Path) -> None:
    split, result = random_split(20), evaluation(20)
    predictions = Predictions(
        seed=0, weights=Path("final"), epoch=1, validation=result.probabilities, test=result.probabilities
    )
    alone = MembersEvaluation(predictions=[predictions], members=[result], ensemble=result)
    evaluate.write_tables(tmp_path / "evaluate", split, alone, 5, ["cat", "dog", "owl"])
    assert len(pd.read_csv(tmp_path / "evaluate" / "mistakes.csv")) == 5
    everyone = pd.read_parquet(tmp_path / "evaluate" / "predictions.parquet")
    np.testing.assert_array_equal(everyone["example_id"], split.example_id)
    probabilities = everyone[[f"probability_{label}" for label in range(3)]].to_numpy()
    np.testing.assert_array_equal(probabilities, result.probabilities)
    files = np.array([f"cat/{number}.jpg" for number in split.example_id])
    evaluate.write_tables(tmp_path / "files", dataclasses.replace(split, files=files), alone, 5, ["cat", "dog", "owl"])
    mistakes = pd.read_csv(tmp_path / "files" / "mistakes.csv")
    assert mistakes["file"].tolist() == [f"cat/{number}.jpg" for number in mistakes["example_id"]]
    named = pd.read_csv(tmp_path / "evaluate" / "per_class.csv")["class"].tolist()
    assert named == [name for label, name in enumerate(["cat", "dog", "owl"]) if label in result.labels]


def test_confusion_of_unequal_classes_is_coloured_by_shares_of_each_label() -> None:
    confusion = np.array([[91, 9, 0], [1, 3, 0], [0, 0, 0]])
    for by_share, colours in ((False, [[0, 9, 0], [1, 0, 0]]), (True, [[0, 0.09, 0], [0.25, 0, 0]])):
        figure = evaluate._draw_confusion(confusion, "patches", ["cat", "dog", "owl"], by_share=by_share)
        drawn = np.asarray(figure.axes[0].images[0].get_array())
        np.testing.assert_allclose(drawn, [*colours, [0, 0, 0]])
        assert [text.get_text() for text in figure.axes[0].texts[:4]] == ["91", "9", "·", "1"]


def test_tables_keep_a_class_that_all_examples_have(tmp_path: Path) -> None:
    """Its AUROC is not known."""
    split = dataclasses.replace(random_split(20), labels=np.full(20, 1, np.int32))
    one = dataclasses.replace(predictions(0), test=np.float32(np.eye(3)[[1] * 18 + [0] * 2]))
    evaluation = evaluate.evaluate([one], (SPLITS[0], split), CONFIG)
    evaluate.write_tables(tmp_path / "evaluate", split, evaluation, 5, ["cat", "dog", "owl"])
    (row,) = pd.read_csv(tmp_path / "evaluate" / "per_class.csv").to_dict("records")
    assert (row["class"], row["recall"], np.isnan(row["auroc"])) == ("dog", 0.9, True)
    assert row["recall_low"] == pytest.approx(0.699, abs=1e-3)
