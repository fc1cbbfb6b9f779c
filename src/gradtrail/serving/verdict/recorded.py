"""The numbers of an exported model that its files, its metrics and the predictions of its evaluation hold."""

from collections.abc import Mapping

import numpy as np

from gradtrail.core.intervals import share_interval
from gradtrail.serving.candidate import Candidate, Predictions
from gradtrail.serving.verdict.judge import Measured
from gradtrail.tracking.names import metric_name

_STAGE = "export"
_METRICS = {  # limit → metric of the stage `export`, and the method of its interval
    "accuracy_lower_bound": ("accuracy", "Wilson"),
    "calibration_error": ("expected_calibration_error", "pivotal bootstrap over examples"),
    "worst_class_recall": ("worst_class_recall", "Wilson"),
}


def read_recorded(candidate: Candidate) -> tuple[dict[str, Measured], dict[str, str]]:
    """Return the numbers in the files and metrics of an export, by limit; and the reason for each missing number."""
    export = candidate.export.folder
    size = sum(path.stat().st_size for path in export.iterdir()) / 2**20
    numbers = {"size_mib": Measured(value=size, low=size, high=size, how="exact")}
    for limit, (key, how) in _METRICS.items():
        number = _with_interval(candidate.export_metrics, key, how)
        if number is not None:
            numbers[limit] = number
    reason = "the run of `export` has no such metric; `gradtrail sync` rebuilds the run"
    return numbers, {limit: reason for limit in _METRICS if limit not in numbers}


def agreement(model: Predictions | None, champion: Predictions | None) -> Measured | str:
    """Return the share of the test split that gets the same label from both, or the reason why it is not known."""
    if model is None or champion is None:
        return f"the predictions of the {'model' if model is None else 'champion'} are not here"
    if (pairs := model.paired_with(champion)) is None:
        return "the champion was evaluated on another test split"
    _, labels, champion_labels = pairs
    return share(labels == champion_labels)


def share(hits: np.ndarray) -> Measured:
    """Return the share of hits with Wilson's 95 % interval."""
    interval = share_interval(int(hits.sum()), len(hits))
    return Measured(value=interval.value, low=interval.low, high=interval.high, how="Wilson")


def _with_interval(metrics: Mapping[str, float], key: str, how: str) -> Measured | None:
    names = [metric_name(_STAGE, f"{key}{end}") for end in ("", "_low", "_high")]
    if not all(name in metrics for name in names):
        return None
    value, low, high = (metrics[name] for name in names)
    return Measured(value=value, low=low, high=high, how=how)
