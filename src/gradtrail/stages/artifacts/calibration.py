"""The temperature that calibrates a weights file: `results/evaluate/calibration.json`, written by `evaluate`."""

import dataclasses
import json
from pathlib import Path

from gradtrail.core.evaluate.calibration import HIGHEST, LOWEST
from gradtrail.core.evaluate.metrics import Evaluation
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.files import write_json
from gradtrail.support.errors import UserError

_FILE = "calibration.json"


def write_calibration(folder: Path, weights: Path, result: Evaluation, *, num_examples: int) -> None:
    """Write the temperature, of which weights it is, and what it does to the scores of the test split.

    Args:
        folder: the results of the stage.
        weights: the weights file that was evaluated.
        result: of the test split.
        num_examples: of the validation split, on which the temperature was fitted.
    """
    scores = {"calibrated": result.scores, "uncalibrated": result.scores_uncalibrated}
    fitted = {"split": "validation", "num_examples": num_examples, "lowest": LOWEST, "highest": HIGHEST}
    content = {"weights": weights.as_posix(), "weights_digest": digest(weights), "fitted_on": fitted}
    content |= {kind: {name: dataclasses.asdict(each) for name, each in of.items()} for kind, of in scores.items()}
    write_json(folder / _FILE, {**content, "temperature": result.temperature})


def read_temperature(weights: Path, results: Path) -> float | None:
    """Return the temperature that was fitted for a weights file; None where there is none for these bytes.

    Args:
        weights: a weights file.
        results: the results of an evaluation, of these weights or of others.

    Raises:
        UserError: the calibration is damaged; one line.
    """
    path = results / _FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        temperature = float(content["temperature"])
        if not LOWEST <= temperature <= HIGHEST:
            raise ValueError(f"temperature {temperature}")
        return temperature if content["weights_digest"] == digest(weights) else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: no calibration: {error}; `dvc checkout` restores it") from None
