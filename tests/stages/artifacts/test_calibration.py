"""A calibration applies to the weights that it was fitted for, and to no others."""

import json
from pathlib import Path

import numpy as np
import pytest

from gradtrail.core.evaluate.metrics import Evaluation, evaluate
from gradtrail.stages.artifacts.calibration import read_temperature, write_calibration


def result_at(temperature: float) -> Evaluation:
    return evaluate(np.log([[0.7, 0.3]]), np.array([0]), temperature=temperature, calibration_bins=2)


RESULT = result_at(0.5)


def test_temperature_is_that_of_the_same_bytes(tmp_path: Path) -> None:
    weights = tmp_path / "final.safetensors"
    weights.write_bytes(b"weights")
    assert read_temperature([weights], tmp_path) is None
    write_calibration(tmp_path, {weights: RESULT}, RESULT, num_examples=3)
    assert read_temperature([weights], tmp_path) == 0.5
    weights.write_bytes(b"others")
    assert read_temperature([weights], tmp_path) is None


def test_ensemble_has_a_temperature_of_its_own(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first", "second", "third")]
    for path in paths:
        path.write_text(path.name)
    members = dict(zip(paths, map(result_at, (0.5, 0.7, 0.9)), strict=True))
    write_calibration(tmp_path, members, result_at(1.5), num_examples=3)
    assert read_temperature(paths, tmp_path) == read_temperature(paths[::-1], tmp_path) == 1.5
    assert [read_temperature([path], tmp_path) for path in paths] == [0.5, 0.7, 0.9]
    assert read_temperature(paths[:2], tmp_path) is None


def test_it_holds_the_scores_before_and_after(tmp_path: Path) -> None:
    weights = tmp_path / "final.safetensors"
    weights.write_bytes(b"weights")
    write_calibration(tmp_path, {weights: RESULT}, RESULT, num_examples=3)
    result = json.loads((tmp_path / "calibration.json").read_text())
    assert result["fitted_on"] == {"split": "validation", "num_examples": 3, "lowest": 0.05, "highest": 20.0}
    assert result["uncalibrated"]["brier"]["value"] == pytest.approx(2 * 0.3**2)
    assert result["calibrated"]["brier"]["value"] == pytest.approx(2 * (0.09 / 0.58) ** 2)
