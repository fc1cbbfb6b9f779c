"""Metrics of an export are correct, and predictions of other examples are refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from exports import SHAPE, small_network, write_small_export
from factories import new_compiler, random_split

from gradtrail.core.common.intervals import Interval, share_interval
from gradtrail.core.common.split import Split
from gradtrail.core.nn.models import num_parameters
from gradtrail.stages.artifacts.calibration import Evaluated
from gradtrail.stages.artifacts.exported import read_export
from gradtrail.stages.export import checks
from gradtrail.support.errors import UserError

SPLIT = random_split(21, shape=SHAPE)
EVALUATED = Evaluated(
    kind="final", weights={}, temperature=0.5, calibration_error=Interval(value=0.1, low=0.0, high=0.2)
)


def predictions(probabilities: np.ndarray, split: Split = SPLIT) -> pd.DataFrame:
    table = {"example_id": split.example_id, "label": split.labels, "predicted": probabilities.argmax(axis=1)}
    return pd.DataFrame(table | {f"probability_{label}": column for label, column in enumerate(probabilities.T)})


def test_metrics_of_an_export(tmp_path: Path) -> None:
    folder = write_small_export(tmp_path / "export", model="linear", batch_sizes=(8,))
    exported = read_export(folder)
    probabilities = checks.answers(exported, checks.compile_largest(exported, compiler=new_compiler()), SPLIT)
    np.testing.assert_array_equal(probabilities, exported.predict(SPLIT.images))
    changed = probabilities.copy()
    changed[4] = np.roll(changed[4], 1)
    evaluated = predictions(changed)
    metrics = checks.measure(exported, folder, EVALUATED, evaluated, probabilities)

    is_correct = np.asarray(evaluated["predicted"]) == SPLIT.labels
    recalls = {label: is_correct[SPLIT.labels == label] for label in np.unique(SPLIT.labels)}
    worst = min(recalls, key=lambda label: recalls[label].mean())
    assert metrics["accuracy"] == is_correct.mean()
    accuracy = share_interval(int(is_correct.sum()), 21)
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == (accuracy.low, accuracy.high)
    assert (metrics["worst_class"], metrics["worst_class_recall"]) == (worst, recalls[worst].mean())
    assert metrics["worst_class_recall_low"] == share_interval(int(recalls[worst].sum()), len(recalls[worst])).low
    assert [metrics[f"expected_calibration_error{end}"] for end in ("_low", "", "_high")] == [0.0, 0.1, 0.2]
    assert metrics["largest_difference"] == np.abs(probabilities[4] - changed[4]).max() > 0
    assert metrics["num_other_labels"] == 1
    assert metrics["num_parameters"] == num_parameters(small_network(model="linear").members[0])
    assert metrics["size_bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert metrics["weights_bytes"] == (folder / "weights.safetensors").stat().st_size
    assert metrics["forward_cuda_bytes"] == (folder / "forward.cuda.bin").stat().st_size


def test_predictions_are_read_as_they_were_written(tmp_path: Path) -> None:
    table = predictions(np.full((21, 3), 1 / 3, np.float32))
    table.to_parquet(tmp_path / "predictions.parquet", index=False)
    pd.testing.assert_frame_equal(checks.read_evaluation(tmp_path, SPLIT, 3), table)
    with pytest.raises(UserError, match="belongs to another test split"):
        checks.read_evaluation(tmp_path, dataclasses.replace(SPLIT, labels=SPLIT.labels[::-1].copy()), 3)
    with pytest.raises(UserError, match="not a table of this project"):
        checks.read_evaluation(tmp_path, SPLIT, 4)
    (tmp_path / "predictions.parquet").write_bytes(b"words")
    with pytest.raises(UserError, match="not a table of this project"):
        checks.read_evaluation(tmp_path, SPLIT, 3)
    (tmp_path / "predictions.parquet").unlink()
    with pytest.raises(UserError, match="no such file"):
        checks.read_evaluation(tmp_path, SPLIT, 3)
