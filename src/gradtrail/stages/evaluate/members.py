"""The evaluation of the members of a training, and of their ensemble, which is served."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Array, Float

from gradtrail.core.common.split import Split
from gradtrail.core.evaluate import metrics
from gradtrail.core.evaluate.calibration import fit_temperature, log_mean_softmax
from gradtrail.core.evaluate.metrics import EvaluateConfig, Evaluation
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model
from gradtrail.stages.artifacts.data_files import DatasetInfo
from gradtrail.stages.artifacts.members import over_members
from gradtrail.stages.artifacts.weights import read_weights, require_same_data
from gradtrail.support.errors import UserError

_ENSEMBLE = (
    *("accuracy", "accuracy_low", "accuracy_high", "loss", "brier", "temperature"),
    *("expected_calibration_error", "expected_calibration_error_uncalibrated"),
)
_PREFIX = "ensemble_"

Logits = Float[np.ndarray, "examples classes"]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions of one member."""

    seed: int
    weights: Path  # file with its weights
    epoch: int  # epoch of the weights
    validation: Logits  # float32
    test: Logits


@dataclass(frozen=True, kw_only=True)
class MembersEvaluation:
    """Evaluations on the test split, each calibrated with the temperature fitted on the validation split."""

    predictions: Sequence[Predictions]
    members: Sequence[Evaluation]  # the evaluation of each member, in the same order
    ensemble: Evaluation  # evaluation of the members' mean probabilities; of a single member, its own

    @property
    def weights_evaluations(self) -> dict[Path, Evaluation]:
        """Return weights file → evaluation of the member."""
        return {member.weights: result for member, result in zip(self.predictions, self.members, strict=True)}

    def metrics(self, test: Split) -> dict[str, Any]:
        """Return the metrics of a single member, or means and spreads over several and the ensemble's metrics."""
        metrics = over_members(self._rows(test))
        if len(self.members) == 1:
            return metrics
        of_ensemble = self.ensemble.metrics()
        return metrics | {f"{_PREFIX}{key}": of_ensemble[key] for key in _ENSEMBLE}

    def table(self, test: Split) -> pd.DataFrame:
        """Return a row of metrics for each member."""
        rows = self._rows(test)
        return pd.DataFrame([{"seed": member.seed, **row} for member, row in zip(self.predictions, rows, strict=True)])

    def agreement(self) -> Float[np.ndarray, " examples"]:
        """Return for each example the share of the members that agree with the ensemble's prediction."""
        agree = [result.predicted == self.ensemble.predicted for result in self.members]
        return np.asarray(np.mean(agree, axis=0, dtype=np.float64), np.float32)

    def _rows(self, test: Split) -> list[dict[str, float]]:
        corrected = functools.partial(metrics.corrected_metrics, labels=test.labels, corrected=test.corrected_labels)
        return [
            {"epoch": member.epoch, **result.metrics(), **corrected(result.predicted)}
            for member, result in zip(self.predictions, self.members, strict=True)
        ]


def predict(
    function: Callable[..., dict[str, Array]],
    paths: Mapping[int, Path],
    dataset: DatasetInfo,
    splits: tuple[Split, Split],
    *,
    model: Model,
    batch_size: int,
) -> list[Predictions]:
    """Predict two splits with every member; one network is in memory at a time.

    Args:
        function: compiled function of params, images and labels that returns rows.
        paths: seed → weights file.
        dataset: data set that the members must have been trained on.
        splits: the validation and the test split.
        model: model that the function was compiled for.
        batch_size: batch size of the function.

    Raises:
        UserError: a file is missing or damaged, or of another model or data set.
    """
    predictions = []
    for seed, path in paths.items():
        other, params, about = read_weights(path)
        require_same_data(path, about, dataset)
        if other.config != model.config:
            raise UserError(
                f"{path}: weights of {other.config.name}, but those of another member are {model.config.name}"
            )
        of_split = functools.partial(inference.predict_logits, functools.partial(function, params), batch_size)
        validation, test = map(of_split, splits)
        predictions.append(Predictions(seed=seed, weights=path, epoch=about.epoch, validation=validation, test=test))
    return predictions


def evaluate(
    predictions: Sequence[Predictions], splits: tuple[Split, Split], config: EvaluateConfig
) -> MembersEvaluation:
    """Evaluate members and their ensemble; `splits` are those for validation and test."""
    fitted_on, tested_on = splits

    def evaluated(validation: Logits, test: Logits) -> Evaluation:
        temperature = fit_temperature(validation, fitted_on.labels)
        return metrics.evaluate(
            test, tested_on.labels, temperature=temperature, calibration_bins=config.calibration_bins
        )

    members = [evaluated(member.validation, member.test) for member in predictions]
    ensemble = members[0]
    if len(members) > 1:
        logits = ([member.validation for member in predictions], [member.test for member in predictions])
        ensemble = evaluated(*(log_mean_softmax(np.array(member_logits, np.float64)) for member_logits in logits))
    return MembersEvaluation(predictions=predictions, members=members, ensemble=ensemble)
