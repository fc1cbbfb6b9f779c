"""The shared view of MLflow's UI that shows trainings: columns of its table, and charts, in `trainings_view.json`.

The UI stores a shared view as a tag of the experiment, and opens it by a link; a person's own arrangement of the page
does not change.
"""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from gradtrail.tracking.store import experiment_id
from gradtrail.tracking.tags import VIEW


def share_view(client: MlflowClient) -> str:
    """Write the view to the experiment of trainings, unless it has it; return the link, relative to the UI."""
    experiment = experiment_id(client, "models")
    text = json.dumps(view_state(), sort_keys=True)
    value = "deflate;" + base64.b64encode(zlib.compress(text.encode())).decode()
    if client.get_experiment(experiment).tags.get(VIEW) != value:
        client.set_experiment_tag(experiment, VIEW, value)
    key = VIEW.rpartition(".")[2]
    page = f"viewStateShareKey={key}&compareRunsMode=CHART&workflowType=machine_learning"
    return f"#/experiments/{experiment}/runs?{page}"


def view_state() -> dict[str, Any]:
    """Return the view as the UI reads it: every section and every chart with all fields that the UI requires."""
    view = json.loads(Path(__file__).with_name("trainings_view.json").read_text(encoding="utf-8"))
    charts = [
        view["chart"] | {"uuid": f"chart-{number}", "selectedMetricKeys": [chart["metricKey"]]} | chart
        for number, chart in enumerate(view["charts"])
    ]
    sections = [view["section"] | section for section in view["sections"]]
    return {**view["page"], "compareRunSections": sections, "compareRunCharts": charts}
