"""Reads the artifacts of a run, and says which of them MLflow's UI shows as tables."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from mlflow import MlflowClient

from gradtrail.tracking.tags import TABLES


def download(client: MlflowClient, run_id: str, path: str, folder: Path) -> Path | None:
    """Download an artifact of a run into a folder; return None if the run has none at this path."""
    if path not in {artifact.path for artifact in client.list_artifacts(run_id, path.rpartition("/")[0] or None)}:
        return None
    return Path(client.download_artifacts(run_id, path, str(folder)))


def read_artifact(client: MlflowClient, run_id: str, path: str) -> str:
    """Return the text of an artifact of a run; empty if the run has none at this path."""
    with tempfile.TemporaryDirectory() as folder:
        file = download(client, run_id, path, Path(folder))
        return file.read_text(encoding="utf-8", errors="replace") if file else ""


def announce_tables(client: MlflowClient, run_id: str, paths: Iterable[str]) -> None:
    """Add artifacts to those that the UI shows as tables; the first one opens."""
    before = client.get_run(run_id).data.tags.get(TABLES, "[]")
    announced = {table["path"] for table in json.loads(before)}
    after = json.dumps([{"path": path, "type": "table"} for path in sorted(announced | {*paths})])
    if after != before:
        client.set_tag(run_id, TABLES, after)
