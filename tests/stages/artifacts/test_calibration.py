"""A calibration is read for the weights that it was fitted for, and for no others."""

import json
from pathlib import Path

import numpy as np
import pytest

from gradtrail.core.evaluate.metrics import evaluate
from gradtrail.stages.artifacts.calibration import read_temperature, write_calibration
from gradtrail.support.errors import UserError

RESULT = evaluate(np.array([[0.7, 0.3]], np.float32), np.array([0]), temperature=0.5, calibration_bins=2)


def test_a_temperature_is_that_of_the_same_bytes(tmp_path: Path) -> None:
    weights = tmp_path / "final.safetensors"
    weights.write_bytes(b"weights")
    assert read_temperature(weights, tmp_path) is None
    write_calibration(tmp_path, weights, RESULT, num_examples=3)
    assert read_temperature(weights, tmp_path) == 0.5
    weights.write_bytes(b"others")
    assert read_temperature(weights, tmp_path) is None


def test_it_holds_the_scores_before_and_after(tmp_path: Path) -> None:
    weights = tmp_path / "final.safetensors"
    weights.write_bytes(b"weights")
    write_calibration(tmp_path, weights, RESULT, num_examples=3)
    found = json.loads((tmp_path / "calibration.json").read_text())
    assert found["fitted_on"] == {"split": "validation", "num_examples": 3, "lowest": 0.05, "highest": 20.0}
    assert found["uncalibrated"]["brier"]["value"] == pytest.approx(2 * 0.3**2)
    assert found["calibrated"]["brier"]["value"] == pytest.approx(2 * (0.09 / 0.58) ** 2)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"temperature": 100, "weights_digest": ""}', '{"temperature": "x"}']
)
def test_a_damaged_calibration_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(UserError, match=r"calibration\.json: no calibration: ") as fault:
        read_temperature(tmp_path / "calibration.json", tmp_path)
    assert "\n" not in str(fault.value)
