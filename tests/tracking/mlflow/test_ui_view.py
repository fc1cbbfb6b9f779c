"""The shared view of the UI: what its tag decodes to, and its link."""

import base64
import json
import zlib
from typing import Any

from gradtrail.tracking.mlflow.ui_view import as_tag, link


def state() -> dict[str, Any]:
    kind, _, content = as_tag().partition(";")
    assert kind == "deflate"
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(content)))
    return found


def test_every_chart_is_in_a_section_and_has_a_name_of_its_own() -> None:
    charts, sections = state()["compareRunCharts"], state()["compareRunSections"]
    assert {chart["metricSectionId"] for chart in charts} == {section["uuid"] for section in sections}
    assert len({chart["uuid"] for chart in charts}) == len(charts)
    assert all(chart["selectedMetricKeys"] == [chart["metricKey"]] for chart in charts)


def test_the_accuracy_is_drawn_over_epochs_and_over_time() -> None:
    axes = [c["xAxisKey"] for c in state()["compareRunCharts"] if c["metricKey"] == "train/validation_accuracy"]
    assert axes == ["step", "metric"]


def test_the_tag_is_the_same_every_time_and_fits_the_store() -> None:
    assert as_tag() == as_tag()
    assert len(as_tag()) < 5000


def test_the_link_names_the_view_and_opens_its_charts_among_trainings() -> None:
    base, _, query = link("http://127.0.0.1:5000", "2").partition("?")
    assert base == "http://127.0.0.1:5000/#/experiments/2/runs"
    options = dict(pair.split("=") for pair in query.split("&"))
    assert options == {
        "viewStateShareKey": "gradtrail",
        "compareRunsMode": "CHART",
        "workflowType": "machine_learning",
    }


def test_the_columns_of_the_table_fit_on_a_screen() -> None:
    columns = state()["selectedColumns"]
    assert columns[:3] == [f"metrics.`eval/accuracy{end}`" for end in ("", "_low", "_high")]
    assert set(columns[3:]) == {"metrics.`train/seconds`", "params.`train.seed`", "tags.`dvc.exp_name`"}
