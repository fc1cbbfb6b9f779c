"""A shared view of MLflow's UI that compares trainings: which columns and which charts.

The UI stores a shared view as a tag of the experiment, and opens it by a link that names it. `gradtrail ui` writes this
one; a person's own arrangement of the page is not changed.
"""

import base64
import json
import zlib
from typing import Any

from mlflow import MlflowClient

_NAME = "gradtrail"
_TAG = f"mlflow.sharedViewState.{_NAME}"
_COLUMNS = (  # no more than a screen of 1,440 pixels shows; names say in what runs differ
    "metrics.`eval/accuracy`",
    "metrics.`eval/accuracy_low`",
    "metrics.`eval/accuracy_high`",
    "metrics.`train/seconds`",
    "params.`train.seed`",
    "tags.`dvc.exp_name`",
)
_LINE, _BAR, _LOGARITHMIC = {"type": "LINE"}, {"type": "BAR"}, {"scaleType": "log"}
_OVER_TIME = {"xAxisKey": "metric", "selectedXAxisMetricKey": "train/elapsed_seconds", "useGlobalXaxisKey": False}
_DIFFERENCES = {  # a table with a column for each run: metrics, and params that differ
    "type": "DIFFERENCE",
    "chartName": "Metrics, and params that differ",
    "compareGroups": ["Model metrics", "Parameters"],
    "showChangeFromBaseline": False,
    "showDifferencesOnly": True,
    "baselineColumnUuid": "",
}
_CHARTS: dict[str, list[tuple[str, dict[str, Any]]]] = {  # section → metric, options of its chart
    "Learning curves": [
        ("train/validation_accuracy", _LINE),
        ("train/validation_accuracy", _LINE | _OVER_TIME),
        ("train/validation_loss", _LINE),
        ("train/cross_entropy", _LINE),
        ("steps/grad_norm", _LINE | _LOGARITHMIC),
        ("steps/learning_rate", _LINE),
    ],
    "Results": [
        ("eval/accuracy", _BAR),
        ("train/seconds", _BAR),
        ("eval/loss", _BAR),
        ("eval/expected_calibration_error", _BAR),
        ("train/compile_total_seconds", _BAR),
        ("gradients/noise_scale_typical", _BAR | _LOGARITHMIC),
    ],
    "Runs side by side": [("", _DIFFERENCES)],
}
_CARD = {  # fields that the UI requires of every chart
    "runsCountToCompare": 10,
    "deleted": False,
    "isGenerated": False,
    "lineSmoothness": 0,
    "xAxisScaleType": "linear",
    "scaleType": "linear",
    "range": {},
    "xAxisKey": "step",
    "selectedXAxisMetricKey": "",
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "ignoreOutliers": False,
    "useGlobalXaxisKey": True,
    "useGlobalLineSmoothing": True,
}


def write_view(client: MlflowClient, experiment_id: str) -> None:
    """Write the view to an experiment, unless it has it already."""
    tag = as_tag()
    if client.get_experiment(experiment_id).tags.get(_TAG) != tag:
        client.set_experiment_tag(experiment_id, _TAG, tag)


def as_tag() -> str:
    """Return the view as the UI stores it."""
    return "deflate;" + base64.b64encode(zlib.compress(json.dumps(_state(), sort_keys=True).encode())).decode()


def link(base: str, experiment_id: str) -> str:
    """Return the link to the charts of the comparison, the UI's address given; a button there leads to the table."""
    view = f"viewStateShareKey={_NAME}&compareRunsMode=CHART&workflowType=machine_learning"
    return f"{base}/#/experiments/{experiment_id}/runs?{view}"


def _state() -> dict[str, Any]:
    sections = list(_CHARTS)
    return {
        "selectedColumns": _COLUMNS,
        "searchFilter": "tags.stage = 'train'",
        "orderByKey": "metrics.`eval/accuracy`",
        "orderByAsc": False,
        "runsHiddenMode": "FIRST_20_RUNS",
        "isAccordionReordered": True,  # else the UI puts its own sections, of all other metrics, in between
        "compareRunSections": [_section(number, name) for number, name in enumerate(sections)],
        "compareRunCharts": [
            _card(number, place, metric, special)
            for number, name in enumerate(sections)
            for place, (metric, special) in enumerate(_CHARTS[name])
        ],
    }


def _section(number: int, name: str) -> dict[str, Any]:
    state = {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    columns = 1 if _CHARTS[name][0][1] is _DIFFERENCES else 2
    return {
        "uuid": f"section-{number}",
        "name": name,
        "columns": columns,
        "cardHeight": 400 if columns == 1 else 330,
    } | state


def _card(section: int, place: int, metric: str, special: dict[str, Any]) -> dict[str, Any]:
    about = {"uuid": f"chart-{section}-{place}", "metricSectionId": f"section-{section}", "metricKey": metric}
    return _CARD | about | {"selectedMetricKeys": [metric]} | special
