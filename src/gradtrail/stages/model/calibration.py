"""The evaluated weights and the temperatures that calibrate them, written by `evaluate`.

`results/evaluate/calibration.json`, and `model.css`, which shows a banner in a report of other weights.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from gradtrail.core.evaluate import HIGHEST, LOWEST, Evaluation
from gradtrail.core.intervals import Interval
from gradtrail.core.nn.models import WeightsKind
from gradtrail.stages.common.files import digest, read_json, write_json
from gradtrail.stages.model.members import weights_paths
from gradtrail.support.errors import UserError

_FILE = "calibration.json"
_FEW = 200  # validation images; a temperature from fewer is uncertain


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The evaluated weights and their calibration."""

    kind: WeightsKind
    weights: Mapping[int, Path]  # seed → weights file of each network; several are an ensemble
    temperature: float  # temperature of the probabilities
    calibration_error: Interval  # expected calibration error on the test split, after calibration


def write_calibration(
    folder: Path, members: Mapping[Path, Evaluation], ensemble: Evaluation, *, num_examples: int
) -> None:
    """Write the temperature of each member and of the ensemble, and the scores before and after calibration.

    Args:
        folder: the results of the stage.
        members: weights file of each member → its evaluation on the test split.
        ensemble: the evaluation of the members' mean probabilities.
        num_examples: size of the validation split, on which the temperatures were fitted.
    """
    member_rows = [
        {"temperature": result.temperature, "weights": path.as_posix(), "weights_digest": digest(path)}
        for path, result in members.items()
    ]
    content = {
        "calibrated": {name: dataclasses.asdict(interval) for name, interval in ensemble.scores.items()},
        "uncalibrated": {name: dataclasses.asdict(interval) for name, interval in ensemble.scores_uncalibrated.items()},
        "fitted_on": {"split": "validation", "num_examples": num_examples, "lowest": LOWEST, "highest": HIGHEST},
        "members": member_rows,
        "temperature": ensemble.temperature,
    }
    write_json(folder / _FILE, content)
    write_rule(folder)


def warn_of_few(num_examples: int) -> None:
    """Print a line on stderr if the validation split is small."""
    if num_examples < _FEW:
        print(
            f"evaluate: warning: the temperature was fitted on {num_examples} validation images, so probabilities may "
            f"be too high or too low; use {_FEW} or more, by preprocess.validation_fraction or with more images",
            file=sys.stderr,
        )


def write_rule(folder: Path) -> None:
    """Write `model.css`: a style sheet, as it cannot run code; a report that was sent without it ignores it."""
    rule = f':root:not([data-evaluation="{digest(folder / _FILE)}"]) #earlier {{ display: block !important }}\n'
    (folder / "model.css").write_text(rule, encoding="utf-8")


def read_evaluated(results: Path, models: Path) -> Evaluated:
    """Read which weights were evaluated; raise UserError, one line, if the weights have changed since."""
    path = results / _FILE
    content = read_json(path)
    rows = content["members"]
    (kind,) = (kind for kind in get_args(WeightsKind) if kind == Path(rows[0]["weights"]).stem)
    weights = weights_paths(models, kind)
    if sorted(map(digest, weights.values())) != sorted(row["weights_digest"] for row in rows):
        raise UserError(f"{path}: belongs to other weights than those in {models}; run `dvc repro evaluate`")
    error = Interval(**content["calibrated"]["expected_calibration_error"])
    return Evaluated(kind=kind, weights=weights, temperature=content["temperature"], calibration_error=error)
