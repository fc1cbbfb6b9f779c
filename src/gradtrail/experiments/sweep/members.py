"""The members of trainings in MLflow: the seeds of a run, and the metrics per seed."""

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from gradtrail.core.train.config import VARIED
from gradtrail.stages.common.params import MEMBERS, SEED, VARY

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_TABLE = "results/members.csv"
SeedMetrics = Mapping[int, Mapping[str, Any]]  # seed → metric → value
ReadTable = Callable[["Run"], SeedMetrics]


def seeds_trained(run: "Run") -> range | None:
    """Return the seeds of the members of a training's run; None if it has one member, or if they share random numbers.

    Members that share random numbers differ from trainings with one seed.
    """
    params = run.data.params
    members = int(params.get(MEMBERS, 1))
    if members == 1 or {*re.findall(r"\w+", params[VARY])} != {*VARIED}:
        return None
    return range(int(params[SEED]), int(params[SEED]) + members)


def varies_all(params: Mapping[str, Any]) -> bool:
    """Whether members differ in all random choices, given the content of `params.yaml`."""
    return {*params["train"]["vary"]} == {*VARIED}


def read_table(client: "MlflowClient", evaluation: "Run") -> SeedMetrics:
    """Return the metrics of each member from an evaluation's run; empty if it has no such table."""
    from gradtrail.tracking.mlflow.artifacts import download  # late: listing recipes needs no store

    with tempfile.TemporaryDirectory() as folder:
        path = download(client, evaluation.info.run_id, _TABLE, Path(folder))
        rows = pd.read_csv(path).to_dict("records") if path else []
        return {int(row["seed"]): {str(key): value for key, value in row.items()} for row in rows}
