"""Shared views of MLflow's UI: trainings, compile times, and tables of compiled functions; their columns and charts.

The UI stores a shared view as a tag of the experiment, and opens it by a link. `gradtrail ui` writes these; a person's
own arrangement of the page does not change. In charts, runs are grouped by machine, as seconds are compared only within
a machine: the UI groups all charts of a view or none.
"""

import base64
import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow import MlflowClient

from gradtrail.stages.common.pipeline_file import TRAIN, StageSpec, stages_below_training
from gradtrail.tracking.mlflow.naming import metric_name

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
_Charts = Mapping[str, list[tuple[str, dict[str, Any]]]]  # section → (metric, options of its chart)
_TRAINING_CHARTS: _Charts = {
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


@dataclass(frozen=True, kw_only=True)
class View:
    """A shared view."""

    key: str  # name in links
    title: str
    columns: tuple[str, ...]  # columns of the table of runs, as the UI names them
    search: str  # MLflow's filter of runs
    order: str  # column by which runs are ordered, highest first
    charts: _Charts  # none for a view of logged tables

    @property
    def _mode(self) -> str:
        return "CHART" if self.charts else "ARTIFACT"

    @property
    def tag(self) -> str:
        """The experiment's tag for the view."""
        return f"mlflow.sharedViewState.{self.key}"

    def state(self) -> str:
        """Return the view as the UI stores it."""
        text = json.dumps(self._state(), sort_keys=True)
        return "deflate;" + base64.b64encode(zlib.compress(text.encode())).decode()

    def link(self, base: str, experiment_id: str) -> str:
        """Return the link to its charts or tables at the UI's address `base`."""
        view = f"viewStateShareKey={self.key}&compareRunsMode={self._mode}&workflowType=machine_learning"
        return f"{base}/#/experiments/{experiment_id}/runs?{view}"

    def _state(self) -> dict[str, Any]:
        sections = list(self.charts)
        by_machine = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": "machine"}]}
        return {
            "selectedColumns": self.columns,
            "searchFilter": self.search,
            "orderByKey": self.order,
            "orderByAsc": False,
            "groupBy": by_machine if self.charts else None,  # the UI shows no tables of groups
            "useGroupedValuesInCharts": False,  # charts show runs in the order of their groups, not means
            "runsHiddenMode": "FIRST_20_RUNS",
            "isAccordionReordered": True,  # else the UI adds its own sections of all other metrics
            "compareRunSections": [_section(number, name, self.charts) for number, name in enumerate(sections)],
            "compareRunCharts": [
                _card(number, place, metric, special)
                for number, name in enumerate(sections)
                for place, (metric, special) in enumerate(self.charts[name])
            ],
        }


def shared_views(pipeline: Mapping[str, StageSpec]) -> tuple[View, View, View]:
    """Return the views of trainings, of compile times and of compiled functions.

    Args:
        pipeline: Stages; those with costs and runs in the experiment of trainings have charts of compiling.
    """
    in_experiment = {TRAIN, *stages_below_training(pipeline)}
    compiling = [
        stage
        for stage, spec in pipeline.items()
        if stage in in_experiment and f"results/costs/{stage}.json" in spec.outs
    ]
    return _TRAININGS, dataclasses.replace(_COMPILING, charts=_charts_of_compiling(compiling)), _FUNCTIONS


_TRAININGS = View(
    key="gradtrail",
    title="compare training runs",
    columns=(  # as many as fit on a screen of 1,440 pixels
        "metrics.`eval/accuracy`",
        "metrics.`eval/accuracy_low`",
        "metrics.`eval/accuracy_high`",
        "metrics.`train/seconds`",
        "params.`train.seed`",
        "tags.`machine`",
        "tags.`dvc.exp_name`",
    ),
    search="tags.stage = 'train'",
    order="metrics.`eval/accuracy`",
    charts=_TRAINING_CHARTS,
)
_COMPILING = View(
    key="gradtrail-compiling",
    title="compile times",
    columns=(
        "tags.`stage`",
        "metrics.`train/compile_total_seconds`",
        "metrics.`train/compile_cache_hit_rate`",
        "tags.`machine`",
        "tags.`jax`",
        "tags.`attempts`",
    ),
    search="tags.stage != 'report'",
    order="attributes.start_time",
    charts={},
)
_FUNCTIONS = View(
    key="gradtrail-functions",
    title="compiled functions",
    columns=("tags.`stage`", "tags.`machine`"),
    search="tags.stage = 'train'",
    order="attributes.start_time",
    charts={},
)


def write_views(client: MlflowClient, experiment_id: str, views: Iterable[View]) -> None:
    """Write views to an experiment, unless it has them."""
    tags = client.get_experiment(experiment_id).tags
    for view in views:
        if tags.get(view.tag) != view.state():
            client.set_experiment_tag(experiment_id, view.tag, view.state())


def _charts_of_compiling(stages: Sequence[str]) -> _Charts:
    """Return charts with a point for each attempt of a run."""

    def charts_per_stage(key: str, kind: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        return [(metric_name(stage, key), kind) for stage in stages]

    charts = {
        "Seconds of compiling, by attempt": charts_per_stage("compile_total_seconds", _LINE),
        "Share of the programs that came from the cache on disk, by attempt": charts_per_stage(
            "compile_cache_hit_rate", _LINE
        ),
        "Programs that a call had compiled, which should be none": charts_per_stage("compile_unplanned", _BAR),
        "Seconds of the last attempt": [("train/compile_total_seconds", _BAR), ("train/seconds", _BAR)],
    }
    return {section: metrics for section, metrics in charts.items() if metrics}


def _section(number: int, name: str, charts: _Charts) -> dict[str, Any]:
    state = {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    columns = 1 if charts[name][0][1] is _DIFFERENCES else 2
    return {
        "uuid": f"section-{number}",
        "name": name,
        "columns": columns,
        "cardHeight": 400 if columns == 1 else 330,
    } | state


def _card(section: int, place: int, metric: str, special: dict[str, Any]) -> dict[str, Any]:
    about = {"uuid": f"chart-{section}-{place}", "metricSectionId": f"section-{section}", "metricKey": metric}
    return _CARD | about | {"selectedMetricKeys": [metric]} | special
