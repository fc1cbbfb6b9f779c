"""The shared views of the UI: what their tags decode to, and their links."""

import base64
import json
import zlib
from typing import Any

import pytest
from factories import ROOT

from gradtrail.stages.common.pipeline_file import StageSpec, read_pipelines
from gradtrail.tracking.mlflow.ui_view import View, shared_views, write_views

VIEWS = shared_views(read_pipelines(ROOT))
TRAININGS, COMPILING, FUNCTIONS = VIEWS
ALL = pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.key)
BOTH = pytest.mark.parametrize("view", [TRAININGS, COMPILING], ids=lambda view: view.key)


def state(view: View) -> dict[str, Any]:
    kind, _, content = view.state().partition(";")
    assert kind == "deflate"
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(content)))
    return found


@BOTH
def test_every_chart_is_in_a_section_and_has_a_name_of_its_own(view: View) -> None:
    charts, sections = state(view)["compareRunCharts"], state(view)["compareRunSections"]
    assert {chart["metricSectionId"] for chart in charts} == {section["uuid"] for section in sections}
    assert len({chart["uuid"] for chart in charts}) == len(charts)
    assert all(chart["selectedMetricKeys"] == [chart["metricKey"]] for chart in charts)


@BOTH
def test_charts_of_seconds_are_grouped_by_machine_and_show_every_run(view: View) -> None:
    assert any("seconds" in chart["metricKey"] for chart in state(view)["compareRunCharts"])
    assert state(view)["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "machine"}]
    assert not state(view)["useGroupedValuesInCharts"], "a mean over runs is none of a run"
    assert "tags.`machine`" in state(view)["selectedColumns"]


def test_the_accuracy_is_drawn_over_epochs_and_over_time() -> None:
    charts = state(TRAININGS)["compareRunCharts"]
    axes = [c["xAxisKey"] for c in charts if c["metricKey"] == "train/validation_accuracy"]
    assert axes == ["step", "metric"]


def test_what_was_compiled_is_drawn_over_attempts_for_every_stage_that_compiles() -> None:
    lines = {c["metricKey"] for c in state(COMPILING)["compareRunCharts"] if c["type"] == "LINE"}
    stages = ("train", "eval", "export", "gradients", "profile", "privacy_audit")
    kinds = ("compile_total_seconds", "compile_cache_hit_rate")
    assert lines == {f"{stage}/{kind}" for stage in stages for kind in kinds}


def test_a_new_stage_that_compiles_below_training_has_charts() -> None:
    costs = ("results/costs/toy.json", "results/toy")
    toy = StageSpec(cmd="it", deps=("models/final.safetensors",), params={}, outs=costs)
    beside = StageSpec(cmd="it", deps=("data/raw",), params={}, outs=("results/costs/beside.json",))
    _, compiling, _ = shared_views(read_pipelines(ROOT) | {"toy": toy, "beside": beside})
    drawn = {chart["metricKey"] for chart in state(compiling)["compareRunCharts"]}
    assert {key for key in drawn if key.startswith("toy/")} == {
        f"toy/compile_{kind}" for kind in ("total_seconds", "cache_hit_rate", "unplanned")
    }
    assert not any(key.startswith("beside/") for key in drawn), "its runs are in another experiment"


def test_where_no_stage_compiles_the_view_has_no_empty_section() -> None:
    stage = StageSpec(cmd="it", deps=(), params={}, outs=("models/final.safetensors",))
    _, compiling, _ = shared_views({"train": stage})
    assert [section["name"] for section in state(compiling)["compareRunSections"]] == ["Seconds of the last attempt"]


@ALL
def test_the_tag_is_the_same_every_time_and_fits_the_store(view: View) -> None:
    assert view.state() == view.state()
    assert len(view.state()) < 5000


@ALL
def test_the_link_names_the_view_and_opens_its_charts_or_tables_among_trainings(view: View) -> None:
    base, _, query = view.link("http://127.0.0.1:5000", "2").partition("?")
    assert base == "http://127.0.0.1:5000/#/experiments/2/runs"
    options = dict(pair.split("=") for pair in query.split("&"))
    assert options == {
        "viewStateShareKey": view.key,
        "compareRunsMode": "ARTIFACT" if view is FUNCTIONS else "CHART",
        "workflowType": "machine_learning",
    }


def test_the_view_of_tables_has_no_groups_which_the_ui_does_not_show() -> None:
    assert state(FUNCTIONS)["groupBy"] is None
    assert not state(FUNCTIONS)["compareRunCharts"]


def test_the_views_differ_and_are_written_once() -> None:
    class Store:
        def __init__(self) -> None:
            self.tags: dict[str, str] = {}
            self.written = 0

        def get_experiment(self, _: str) -> "Store":
            return self

        def set_experiment_tag(self, _: str, key: str, value: str) -> None:
            self.tags[key] = value
            self.written += 1

    store: Any = Store()
    write_views(store, "1", VIEWS)
    write_views(store, "1", VIEWS)
    assert store.tags == {f"mlflow.sharedViewState.{view.key}": view.state() for view in VIEWS}
    assert store.written == len(VIEWS) == 3


def test_the_columns_of_the_table_fit_on_a_screen() -> None:
    columns = state(TRAININGS)["selectedColumns"]
    assert columns[:3] == [f"metrics.`eval/accuracy{end}`" for end in ("", "_low", "_high")]
    others = {"metrics.`train/seconds`", "params.`train.seed`", "tags.`machine`", "tags.`dvc.exp_name`"}
    assert set(columns[3:]) == others
