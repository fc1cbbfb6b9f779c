"""What is known of an exported model from its files, its metrics and the predictions of its evaluation."""

from collections.abc import Mapping

import numpy as np

from gradtrail.core.common.intervals import share_interval
from gradtrail.serving.candidate import Candidate, Predictions
from gradtrail.serving.verdict.judge import Measured
from gradtrail.tracking.mlflow.naming import metric_name

_STAGE = "export"
_OF_METRICS = {  # limit → metric of the stage `export`, and how it is found
    "accuracy_lower_bound": ("accuracy", "Wilson"),
    "calibration_error": ("expected_calibration_error", "pivotal bootstrap over examples"),
    "worst_class_recall": ("worst_class_recall", "Wilson"),
}


def known(candidate: Candidate) -> tuple[dict[str, Measured], dict[str, str]]:
    """Return what the files and the metrics of an export say, by limit; and why each other limit is missing."""
    export = candidate.export.folder
    size = sum(path.stat().st_size for path in export.iterdir()) / 2**20
    found = {"size_mib": Measured(value=size, low=size, high=size, how="exact")}
    found |= of_metrics(candidate.export_metrics)
    why = "the run of `export` has no such metric; `gradtrail sync` rebuilds the run"
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
    found = share_interval(int(hits.sum()), len(hits))
    return Measured(value=found.value, low=found.low, high=found.high, how="Wilson")
