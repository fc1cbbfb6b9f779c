"""What is known of an exported model from files: of its metrics, or of the predictions of its evaluation."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from gradtrail.core.evaluate.calibration import score
from gradtrail.core.evaluate.metrics import wilson_interval
from gradtrail.serving.candidate import Candidate, Predictions
from gradtrail.serving.verdict.judge import Measured
from gradtrail.tracking.mlflow.naming import metric_name

_STAGE = "export"
_OF_METRICS = {  # limit → metric of the stage `export`, and how it is found
    "accuracy_lower_bound": ("accuracy", "Wilson"),
    "calibration_error": ("expected_calibration_error", "pivotal bootstrap over examples"),
    "worst_class_recall": ("worst_class_recall", "Wilson"),
}
_DEFAULT_BINS = 15


def known(candidate: Candidate) -> tuple[dict[str, Measured], dict[str, str]]:
    """Return what the files of an export and its evaluation say, by limit; and why each other limit is missing."""
    export = candidate.export.folder
    size = sum(path.stat().st_size for path in export.iterdir()) / 2**20
    found = {"size_mib": Measured(value=size, low=size, high=size, how="exact")}
    found |= of_metrics(candidate.export_metrics)
    if not _OF_METRICS.keys() <= found.keys() and (said := candidate.predictions):
        bins = candidate.evaluation.data.params.get("evaluate.calibration_bins") if candidate.evaluation else None
        found = of_predictions(said.table, int(bins or _DEFAULT_BINS)) | found
    why = "no predictions" if candidate.evaluation else "no evaluation of the exported weights; `dvc repro` makes it"
    return found, {name: why for name in _OF_METRICS if name not in found}


def of_metrics(metrics: Mapping[str, float]) -> dict[str, Measured]:
    """Return what the metrics of the stage `export` tell, each with its interval."""
    found = {}
    for limit, (key, how) in _OF_METRICS.items():
        names = [metric_name(_STAGE, f"{key}{end}") for end in ("", "_low", "_high")]
        if all(name in metrics for name in names):
            value, low, high = (metrics[name] for name in names)
            found[limit] = Measured(value=value, low=low, high=high, how=how)
    return found


def of_predictions(table: pd.DataFrame, num_bins: int) -> dict[str, Measured]:
    """Return what predictions tell; the calibration error only where the probabilities are there."""
    labels, predicted = table["label"].to_numpy(), table["predicted"].to_numpy()
    is_correct = labels == predicted
    worst = min(np.unique(labels), key=lambda label: float(is_correct[labels == label].mean()))
    found = {
        "accuracy_lower_bound": share(is_correct),
        "worst_class_recall": share(is_correct[labels == worst]),
    }
    columns = [name for name in map(str, table) if name.startswith("probability_")]
    if columns and "loss" in table:
        probabilities = table[[f"probability_{label}" for label in range(len(columns))]].to_numpy()
        error = score(probabilities, table["loss"].to_numpy(), labels, num_bins)["expected_calibration_error"]
        how = _OF_METRICS["calibration_error"][1]
        found["calibration_error"] = Measured(value=error.value, low=error.low, high=error.high, how=how)
    return found


def agreement(said: Predictions | None, champions: Predictions | None) -> Measured | str:
    """Return the share of the test split that two models label alike, or why it is not known."""
    if said is None or champions is None:
        return f"the predictions of the {'model' if said is None else 'champion'} are not here"
    if (pairs := said.paired_with(champions)) is None:
        return "the champion was evaluated on another test split"
    _, own, others = pairs
    return share(own == others)


def share(hits: np.ndarray) -> Measured:
    """Return the share of hits with Wilson's 95 % interval."""
    low, high = wilson_interval(int(hits.sum()), len(hits))
    return Measured(value=float(hits.mean()), low=low, high=high, how="Wilson")
