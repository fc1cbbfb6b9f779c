"""The temperatures that calibrate weights: `results/evaluate/calibration.json`, written by `evaluate`."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gradtrail.core.common.intervals import Interval
from gradtrail.core.evaluate.calibration import HIGHEST, LOWEST
from gradtrail.core.evaluate.metrics import Evaluation
from gradtrail.core.nn.models import WeightsKind
from gradtrail.stages.artifacts.members import weights_paths
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.files import read_json, write_json
from gradtrail.support.errors import UserError

_FILE = "calibration.json"
_KINDS: dict[str, WeightsKind] = {kind: kind for kind in get_args(WeightsKind)}


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The evaluated weights and their calibration."""

    kind: WeightsKind
    weights: Mapping[int, Path]  # seed → weights file of each network; several are an ensemble
    temperature: float  # temperature of the probabilities
    calibration_error: Interval  # expected calibration error on the test split, after calibration


def write_calibration(
    folder: Path,
    members: Mapping[Path, Evaluation],
    ensemble: Evaluation,
    *,
    num_examples: int,
) -> None:
    """Write the temperature of each member and of the ensemble, and the scores before and after calibration.

    Args:
        folder: the results of the stage.
        members: weights file of each member → its evaluation on the test split.
        ensemble: the evaluation of the members' mean probabilities.
        num_examples: size of the validation split, on which the temperatures were fitted.
    """
    scores = {"calibrated": ensemble.scores, "uncalibrated": ensemble.scores_uncalibrated}
    fitted = {"split": "validation", "num_examples": num_examples, "lowest": LOWEST, "highest": HIGHEST}
    member_rows = [
        {"temperature": result.temperature, "weights": path.as_posix(), "weights_digest": digest(path)}
        for path, result in members.items()
    ]
    content: dict[str, Any] = {
        kind: {name: dataclasses.asdict(interval) for name, interval in intervals.items()}
        for kind, intervals in scores.items()
    }
    content |= {"fitted_on": fitted, "members": member_rows, "temperature": ensemble.temperature}
    write_json(folder / _FILE, content)


def read_evaluated(results: Path, models: Path) -> Evaluated:
    """Read which weights were evaluated; raise UserError, one line, if the weights have changed since."""
    path = results / _FILE
    content = read_json(path)
    kind = _KINDS[Path(content["members"][0]["weights"]).stem]
    error = Interval(**content["calibrated"]["expected_calibration_error"])
    weights = weights_paths(models, kind)
    temperature = read_temperature([*weights.values()], results)
    if temperature is None:
        raise UserError(f"{path}: belongs to other weights than those in {models}; run `dvc repro evaluate`")
    return Evaluated(kind=kind, weights=weights, temperature=temperature, calibration_error=error)


def read_temperature(weights: Sequence[Path], results: Path) -> float | None:
    """Return the temperature that was fitted for networks; None if there is none for these bytes.

    Args:
        weights: the weights file of one network, or those of all members of an ensemble.
        results: the results of an evaluation, of these weights or of others.

    Raises:
        UserError: the calibration is damaged; one line.
    """
    path = results / _FILE
    if not path.is_file():
        return None
    content = read_json(path)
    temperatures = {member["weights_digest"]: float(member["temperature"]) for member in content["members"]}
    digests = [digest(file) for file in weights]
    if sorted(digests) == sorted(member["weights_digest"] for member in content["members"]):
        return float(content["temperature"])
    return temperatures.get(digests[0]) if len(digests) == 1 else None
