"""MLflow's registry on disk, so that `gradtrail sync` restores it after `mlflow.db` was deleted.

`.gradtrail/registry.json` has the registry's tables and the verdicts. It is written by `verdict`, `promote`, `rollback`
and `sync`; a change in MLflow's UI counts from the next one. A version whose export is not here keeps its number and
aliases, and gets its model once a sync has logged the export. Out of scope: a registry on a server.
"""

import contextlib
import json
import re
import sqlite3
import sys
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModel

from gradtrail.stages.common.files import write_json
from gradtrail.support.paths import SQLITE, database_path, private_folder
from gradtrail.tracking.models import logged_exports
from gradtrail.tracking.runs import search
from gradtrail.tracking.store import experiment_id, store_lock
from gradtrail.tracking.tags import EXPORT_DIGEST, VERDICT

_TABLES = (  # of MLflow's database, those that others refer to first
    *("registered_models", "registered_model_tags", "model_versions", "model_version_tags"),
    "registered_model_aliases",
)
_WITHOUT_MODEL = """
    select name, version, value from model_versions join model_version_tags using (name, version)
    where key = ? and source like 'models:/%'
    and substr(source, 9) not in (select model_id from logged_models where lifecycle_stage = 'active')
"""
_WITH_MODEL = "update model_versions set source = ?, run_id = ?, storage_location = ? where name = ? and version = ?"
_ALIASES = "select alias from registered_model_aliases where name = ? and version = ?"


def keep_registry(client: MlflowClient) -> None:
    """Write the registry to disk; if the database is a new one without a registry, restore it first."""
    if not client.tracking_uri.startswith(SQLITE):
        return
    path = private_folder() / "registry.json"
    created = client.get_experiment(experiment_id(client, "models")).creation_time  # identifies the database
    saved: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {"tables": {}, "verdicts": []}
    with store_lock(client.tracking_uri):
        exports = {model.tags[EXPORT_DIGEST]: model for model in logged_exports(client)}
        with contextlib.closing(sqlite3.connect(database_path(client.tracking_uri))) as store, store:
            store.row_factory = sqlite3.Row
            if saved.get("created") != created and not store.execute("select 1 from registered_models").fetchone():
                _insert(store, saved["tables"])
            _find_models(store, exports)
            tables = {table: [dict(row) for row in store.execute(f"select * from {table}")] for table in _TABLES}  # noqa: S608
        verdicts = {run.data.tags[VERDICT] for run in search(client, f"tags.{VERDICT} != ''")}
        missing = {*saved["verdicts"]} - verdicts
        runs = {run.info.run_id: run for run in search(client)} if missing else {}
        for verdict in missing:
            digests = re.findall("export ([0-9a-f]{64})", verdict)
            run = next((runs.get(exports[digest].source_run_id) for digest in digests if digest in exports), None)
            if run is None or VERDICT not in run.data.tags:  # else it has another one by now
                verdicts.add(verdict)
            if run and VERDICT not in run.data.tags:
                client.set_tag(run.info.run_id, VERDICT, verdict)
        if path.exists() or tables["registered_models"] or verdicts:
            write_json(path, {"created": created, "tables": tables, "verdicts": sorted(verdicts)})


def _insert(store: sqlite3.Connection, tables: dict[str, list[dict[str, Any]]]) -> None:
    for table, rows in tables.items():
        for row in rows:
            columns, marks = ", ".join(row), ", ".join("?" * len(row))
            store.execute(f"insert into {table} ({columns}) values ({marks})", [*row.values()])  # noqa: S608


def _find_models(store: sqlite3.Connection, exports: dict[str, LoggedModel]) -> None:
    """Give versions without a model those of their exports; warn about aliases of one whose export is not here."""
    for name, version, digest in store.execute(_WITHOUT_MODEL, (EXPORT_DIGEST,)).fetchall():
        if model := exports.get(digest):
            values = (f"models:/{model.model_id}", model.source_run_id, model.artifact_location)
            store.execute(_WITH_MODEL, (*values, name, version))
        elif aliases := [alias for (alias,) in store.execute(_ALIASES, (name, version))]:
            remedy = "`dvc fetch --all-commits` with a remote, then sync again"
            print(f"warning: {name}: the export of {', '.join(aliases)} is not here; {remedy}", file=sys.stderr)
