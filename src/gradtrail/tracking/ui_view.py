"""The shared view of MLflow's UI that shows trainings: columns of its table, and charts, in `trainings_view.json`.

The UI stores a shared view as a tag of the experiment, and opens it by a link; a person's own arrangement of the page
does not change.
"""

import base64
import json
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from gradtrail.tracking.store import experiment_id
from gradtrail.tracking.tags import COLOR, VARIANT, VIEW

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#4D4D4D")
FIRST_SETTINGS = {  # of MLflow's UI, in the storage of a browser
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",  # else the Assistant opens
    "mlflow.workflowType_v1": '"machine_learning"',  # else the menu is that for GenAI
}


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


def color_trainings(client: MlflowClient, runs: Iterable[Run]) -> None:
    """Give trainings without a colour the one that fewest others have: MLflow's own, by their ids, are often alike."""
    trainings = sorted((run for run in runs if VARIANT in run.data.tags), key=lambda run: run.info.start_time)
    used = Counter(run.data.tags.get(COLOR) for run in trainings)
    for run in trainings:
        if COLOR not in run.data.tags:
            color = min(_COLORS, key=lambda one: used[one])
            used[color] += 1
            client.set_tag(run.info.run_id, COLOR, color)


def view_state() -> dict[str, Any]:
    """Return the view as the UI reads it: every section and every chart with all fields that the UI requires."""
    view = json.loads(Path(__file__).with_name("trainings_view.json").read_text(encoding="utf-8"))
    columns = [*view["page"]["columnWidths"]]
    return {
        **view["page"],
        "columnOrder": columns,
        "selectedColumns": columns[1:],  # the name is always there
        "compareRunSections": [view["section"] | section for section in view["sections"]],
        "compareRunCharts": [
            view["chart"] | {"uuid": f"chart-{number}"} | chart for number, chart in enumerate(view["charts"])
        ],
    }
