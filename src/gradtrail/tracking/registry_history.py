"""MLflow's registry on disk, so that `gradtrail sync` restores it after `mlflow.db` was deleted.

`.gradtrail/registry.json` has the versions and aliases of registered models and the verdicts, by the digests of their
exports. It is written by `verdict`, `promote`, `rollback` and `sync`; a change in MLflow's UI counts from the next one.
Lost: times of versions, the tables of verdicts, and versions whose export is nowhere any more; numbers do not change.
Out of scope: a registry on a server.
"""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModel

from gradtrail.stages.common.files import write_json
from gradtrail.support.paths import SQLITE, private_folder
from gradtrail.tracking.models import exports_by_digest
from gradtrail.tracking.runs import search
from gradtrail.tracking.store import experiment_id, store_lock
from gradtrail.tracking.tags import EXPORT_DIGEST, VERDICT

_PLACEHOLDER = "restored"  # name of versions that no longer exist


def keep_registry(client: MlflowClient) -> None:
    """Write the registry to disk; if the database is a new one without a registry, restore it first."""
    if not client.tracking_uri.startswith(SQLITE):
        return
    path, experiment = private_folder() / "registry.json", experiment_id(client, "models")
    created = client.get_experiment(experiment).creation_time  # identifies the database
    with store_lock(client.tracking_uri):
        if path.exists() and not client.search_registered_models():
            history = json.loads(path.read_bytes())
            if history["created"] != created and not _restore(client, exports_by_digest(client, experiment), history):
                return
        versions: dict[str, list[dict[str, Any]]] = {}
        for version in client.search_model_versions():
            tags = version.tags
            if EXPORT_DIGEST in tags:
                versions.setdefault(version.name, []).append({"number": int(version.version), "tags": tags})
        aliases = {one.name: one.aliases for one in client.search_registered_models() if one.name in versions}
        verdicts = [run.data.tags[VERDICT] for run in search(client, f"tags.{VERDICT} != ''")]
        content = {"created": created, "versions": versions, "aliases": aliases, "verdicts": verdicts}
        if path.exists() or versions or verdicts:
            write_json(path, content)


def _restore(client: MlflowClient, exports: Mapping[str, LoggedModel], history: Mapping[str, Any]) -> bool:
    """Restore versions, aliases and verdicts; return False, with a warning, if the export of an alias is not here."""
    for name, aliases in history["aliases"].items():
        digests = {str(version["number"]): version["tags"][EXPORT_DIGEST] for version in history["versions"][name]}
        if missing := [alias for alias, number in aliases.items() if digests.get(str(number)) not in exports]:
            remedy = "`dvc fetch --all-commits` with a remote, then sync again"
            print(f"warning: {name}: the export of {', '.join(missing)} is not here; {remedy}", file=sys.stderr)
            return False
    for name, versions in history["versions"].items():
        client.create_registered_model(name)
        tags = {version["number"]: version["tags"] for version in versions}
        for number in range(1, max(tags) + 1):
            model = exports.get(tags.get(number, {}).get(EXPORT_DIGEST, ""))
            if model is None:  # deleted, then or now: MLflow counts it, so that later versions keep their numbers
                client.create_model_version(name, _PLACEHOLDER)
                client.delete_model_version(name, str(number))
                continue
            source, run_id, model_id = f"models:/{model.model_id}", model.source_run_id, model.model_id
            client.create_model_version(name, source, run_id=run_id, tags=tags[number], model_id=model_id)
        for alias, number in history["aliases"][name].items():
            client.set_registered_model_alias(name, alias, str(number))
    for verdict in history["verdicts"]:
        for digest in re.findall("export ([0-9a-f]{64})", verdict):
            if digest in exports:
                client.set_tag(exports[digest].source_run_id, VERDICT, verdict)
    return True
