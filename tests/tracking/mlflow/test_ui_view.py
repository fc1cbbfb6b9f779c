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
BOTH = pytest.mark.parametrize("view", [TRAININGS, COMPILING], ids=lambda view: view.key)


def state(view: View) -> dict[str, Any]:
    kind, _, content = view.state().partition(";")
    assert kind == "deflate"
    content_of_view: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(content)))
    return content_of_view


@BOTH
def test_charts_of_seconds_are_grouped_by_machine_and_show_every_run(view: View) -> None:
    assert any("seconds" in chart["metricKey"] for chart in state(view)["compareRunCharts"])
    assert state(view)["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "machine"}]
    assert not state(view)["useGroupedValuesInCharts"], "a mean over runs is none of a run"
    assert "tags.`machine`" in state(view)["selectedColumns"]


def test_a_new_stage_that_compiles_below_training_has_charts() -> None:
    costs = ("results/costs/toy.json", "results/toy")
    toy = StageSpec(cmd="it", deps=("models/final.safetensors",), params={}, outs=costs)
    unrelated = StageSpec(cmd="it", deps=("data/raw",), params={}, outs=("results/costs/beside.json",))
    _, compiling, _ = shared_views(read_pipelines(ROOT) | {"toy": toy, "beside": unrelated})
    drawn = {chart["metricKey"] for chart in state(compiling)["compareRunCharts"]}
    assert {key for key in drawn if key.startswith("toy/")} == {
        f"toy/compile_{kind}" for kind in ("total_seconds", "cache_hit_rate", "unplanned")
    }
    assert not any(key.startswith("beside/") for key in drawn), "its runs are in another experiment"


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
