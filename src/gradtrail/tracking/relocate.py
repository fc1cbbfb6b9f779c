"""Relocates the artifacts of a store whose repository was moved or copied: MLflow makes every location absolute.

Only the database in this repository's root changes, and of its locations only those in a former `mlruns/` next to it.
This module does not import MLflow, so that a sync that has nothing to do is fast.
"""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlparse

from gradtrail.support.paths import SQLITE, database_path, root
from gradtrail.tracking.tags import EXPERIMENT

_LOCATIONS = (  # table, column
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def own_database(uri: str) -> Path | None:
    """Return the database that a store's URI names, if it lies in this repository's root."""
    path = database_path(uri)
    return path if uri.startswith(SQLITE) and path.resolve().parent == root() else None


def _local_path(location: str) -> Path | None:
    """Return the path in a location of MLflow: a `file:` URI or an absolute path; None for any other."""
    parts = urlparse(location)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    return Path(location) if location.startswith("/") else None


def former_folders(uri: str) -> set[Path]:
    """Return the artifact folders elsewhere that this repository's store names; no other store has any."""
    if (database := own_database(uri)) is None:
        return set()
    query = "select artifact_location from experiments join experiment_tags using (experiment_id) where key = ?"
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as store:
        folders = {_local_path(location) for (location,) in store.execute(query, (EXPERIMENT,))}
    current = (root() / "mlruns").resolve()
    return {folder for folder in folders if folder and folder.name == "mlruns" and folder.resolve() != current}


def relocate_artifacts(uri: str) -> None:
    """Change all locations in a former artifact folder to this repository's, in one transaction; report it on stderr.

    If the artifacts were not copied along but are still in the former folder, nothing changes, with a warning. The
    caller holds the store's lock.
    """
    folder = root() / "mlruns"
    for former in sorted(former_folders(uri)):
        if any(former.glob("*/artifacts")) and not any(folder.glob("*/artifacts")):
            print(
                f"warning: mlflow.db was copied without its artifacts, which are still in {former}; copy them to "
                f"{folder}, then run `gradtrail sync`",
                file=sys.stderr,
            )
            continue
        with closing(sqlite3.connect(database_path(uri))) as store, store:
            for old, new in ((former.as_uri(), folder.as_uri()), (str(former), str(folder))):
                for table, column in _LOCATIONS:
                    change = f"update {table} set {column} = ? || substr({column}, ?)"  # noqa: S608 - both are above
                    inside = f"substr({column} || '/', 1, ?) = ?"
                    store.execute(f"{change} where {inside}", (new, len(old) + 1, len(old) + 1, f"{old}/"))
        print(f"moved or copied from {former.parent}: the artifacts in MLflow now name {root()}", file=sys.stderr)
