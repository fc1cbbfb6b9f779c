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

_FOLDER = "mlruns"
_OWN_LOCATIONS = "select artifact_location from experiments join experiment_tags using (experiment_id) where key = ?"
_LOCATIONS = (  # table → column
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


def local_path(location: str) -> Path | None:
    """Return the path in a location of MLflow: a `file:` URI or an absolute path; None for any other."""
    parts = urlparse(location)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    return Path(location) if location.startswith("/") else None


def is_moved(uri: str) -> bool:
    """Whether a store is this repository's, but names another folder of artifacts; this takes one query."""
    database = own_database(uri)
    return database is not None and len(_former_folders(database)) > 0


def relocate_artifacts(uri: str) -> None:
    """Change all locations in a former artifact folder to this repository's, in one transaction; report it on stderr.

    If the artifacts were not copied along but are still in the former folder, nothing changes, with a warning. The
    caller holds the store's lock.
    """
    database, folder = database_path(uri), root() / _FOLDER
    for former in sorted(_former_folders(database)):
        if any(former.glob("*/artifacts")) and not any(folder.glob("*/artifacts")):
            print(
                f"warning: mlflow.db was copied without its artifacts, which are still in {former}; copy them to "
                f"{folder}, then run `gradtrail sync`",
                file=sys.stderr,
            )
            continue
        with closing(sqlite3.connect(database)) as store, store:
            for old, new in ((former.as_uri(), folder.as_uri()), (str(former), str(folder))):
                for table, column in _LOCATIONS:
                    store.execute(
                        f"update {table} set {column} = ? || substr({column}, ?) "  # noqa: S608 - both are named above
                        f"where {column} = ? or substr({column}, 1, ?) = ?",
                        (new, len(old) + 1, old, len(old) + 1, f"{old}/"),
                    )
        print(f"moved or copied from {former.parent}: the artifacts in MLflow now name {root()}", file=sys.stderr)


def _former_folders(database: Path) -> set[Path]:
    """Return the artifact folders, other than this repository's, that the experiments of this project name."""
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as store:
        locations = store.execute(_OWN_LOCATIONS, (EXPERIMENT,)).fetchall()
    folders = {path for (location,) in locations if (path := local_path(location)) and path.name == _FOLDER}
    return {folder for folder in folders if folder.resolve() != (root() / _FOLDER).resolve()}
