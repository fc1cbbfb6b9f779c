"""The training runs in MLflow's store, for a table.

A database is read directly: importing MLflow and opening its client take four seconds, the query a fiftieth of one.
MLflow's client asks a server. It also asks a database in which the query finds no run, as it creates what is missing
and reports a deleted experiment.
"""

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from gradtrail.support.paths import SQLITE, database_path, store_uri
from gradtrail.tracking.tags import EXPERIMENT, experiment_name

_TRAININGS = """
    select runs.run_uuid, runs.name, runs.status
    from runs
    join tags on tags.run_uuid = runs.run_uuid and tags.key = 'stage' and tags.value = 'train'
    left join latest_metrics as sorted on sorted.run_uuid = runs.run_uuid and sorted.key = :metric
    join experiment_tags on experiment_tags.experiment_id = runs.experiment_id and experiment_tags.key = :key
    where experiment_tags.value = :experiment and runs.lifecycle_stage = 'active'
    order by sorted.is_nan is null, sorted.is_nan, sorted.value * :sign, runs.start_time desc, runs.run_uuid
    limit :limit
"""
_VALUES = (
    "select key, value from params where run_uuid = ?",
    "select key, value from tags where run_uuid = ?",
    "select key, iif(is_nan, 'nan', value) from latest_metrics where run_uuid = ?",
)


@dataclass(frozen=True)
class Training:
    """The run of a training."""

    run_id: str
    name: str
    status: str  # as MLflow calls it, such as `FINISHED`
    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, float]  # last values


def find_trainings(sort_by: str, *, ascending: bool, limit: int | None) -> list[Training]:
    """Return the training runs, at most `limit`, sorted by a metric; first NaN, then runs without it, come last."""
    path = database_path(uri) if (uri := store_uri()).startswith(SQLITE) else None
    trainings: list[Training] = []
    if path and path.is_file() and path.stat().st_size:  # SQLite makes an empty file for whoever opens it
        trainings = _in_database(path, sort_by, ascending=ascending, limit=limit)
    return trainings or _by_client(sort_by, ascending=ascending, limit=limit)


def _in_database(path: Path, sort_by: str, *, ascending: bool, limit: int | None) -> list[Training]:
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as store:
        name = experiment_name("models", store_uri())
        sign, most = 1 if ascending else -1, -1 if limit is None else limit
        values = {"key": EXPERIMENT, "experiment": name, "metric": sort_by, "sign": sign, "limit": most}
        trainings = []
        for run, name, status in store.execute(_TRAININGS, values).fetchall():
            params, tags, metrics = (dict(store.execute(query, (run,))) for query in _VALUES)
            metrics = {key: float(value) for key, value in metrics.items()}  # SQLite has no NaN
            trainings.append(Training(run, name, status, params, tags, metrics))
        return trainings


def _by_client(sort_by: str, *, ascending: bool, limit: int | None) -> list[Training]:
    from gradtrail.tracking.runs import MAX_RESULTS  # late: both import MLflow
    from gradtrail.tracking.store import experiment_id, open_store

    client = open_store()
    runs = client.search_runs(
        [experiment_id(client, "models")],
        "tags.stage = 'train'",
        max_results=MAX_RESULTS if limit is None else limit,
        order_by=[f"metrics.`{sort_by}` {'ASC' if ascending else 'DESC'}"],
    )
    return [
        Training(run.info.run_id, run.info.run_name, run.info.status, run.data.params, run.data.tags, run.data.metrics)
        for run in runs
    ]
