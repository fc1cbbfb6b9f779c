"""Relocates the artifacts of a store whose repository was moved or copied: MLflow stores absolute locations.

Only for the database in this repository's root, with artifacts in `mlruns/` next to it. Other locations (another
folder, a server, a bucket) are not changed. Out of scope: a database elsewhere, which several clones may share.
"""

import contextlib
import functools
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

from gradtrail.support.paths import SQLITE, database_path, root

_FOLDER = "mlruns"
EXPERIMENT = "gradtrail.experiment"  # tag: the name with which an experiment was created, as people rename them
_OWN_EXPERIMENTS = """
select experiment_id, artifact_location from experiments where name in ('data', 'models') or experiment_id = 0
or experiment_id in (select experiment_id from experiment_tags where key = ?)
"""
_TRACE_KEYS = "key in ('mlflow.artifactLocation', 'mlflow.trace.archiveLocation')"
_LOCATIONS = (  # table, column, condition on its rows
    ("experiments", "artifact_location", "true"),
    ("runs", "artifact_uri", "true"),
    ("logged_models", "artifact_location", "true"),
    ("model_versions", "source", "true"),
    ("model_versions", "storage_location", "true"),
    ("workspaces", "default_artifact_root", "true"),
    ("workspaces", "trace_archival_location", "true"),
    ("trace_tags", "value", _TRACE_KEYS),
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
    database = database_path(uri)
    for former in sorted(_former_folders(database)):
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as store:
            store.execute("begin immediate")
            locations = list(_locations_below(store, former))
            if _stayed_behind(former, (location for table, _, _, location in locations if table == "runs")):
                _warn_of_missing(former)
                continue
            for table, column, row, location in locations:
                change = f"update {table} set {column} = ? where rowid = ?"  # noqa: S608 - both are named above
                store.execute(change, (_relocated(location, former), row))
            store.execute("commit")
        number = sum(table == "runs" for table, *_ in locations)
        print(
            f"moved or copied from {former.parent}: the artifacts of {number} runs in MLflow now name {root()}",
            file=sys.stderr,
        )


def _former_folders(database: Path) -> set[Path]:
    """Return the artifact folders, other than this repository's, that a database's experiments name."""
    with contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as store:
        folders = {
            _folder_of(experiment, location) for experiment, location in store.execute(_OWN_EXPERIMENTS, (EXPERIMENT,))
        }
    own_folder = root() / _FOLDER
    return {
        folder for folder in folders if folder and folder != own_folder and folder.resolve() != own_folder.resolve()
    }


def _folder_of(experiment: int, location: str) -> Path | None:
    """Return the artifact folder of an experiment's location; that of MLflow's default experiment is a folder below."""
    path = local_path(location or "")
    if path is not None and experiment == 0:
        path = path.parent if path.name == "0" else None
    return path if path is not None and path.name == _FOLDER else None


def _locations_below(store: sqlite3.Connection, folder: Path) -> Iterator[tuple[str, str, int, str]]:
    """Yield table, column, row id and location of all locations in a folder."""
    for table, column, condition in _LOCATIONS:
        if store.execute("select 1 from pragma_table_info(?) where name = ?", (table, column)).fetchone():
            query = f"select rowid, {column} from {table} where {column} is not null and {condition}"  # noqa: S608
            for row, location in store.execute(query).fetchall():
                if (path := local_path(location)) and path.is_relative_to(folder):
                    yield table, column, row, location


def _relocated(location: str, former: Path) -> str:
    """Return the new location of one in the former folder, as a path or a URI like before."""
    path = local_path(location)
    assert path is not None  # noqa: S101 - `_locations_below` found it in the folder
    now = root() / _FOLDER / path.relative_to(former)
    return str(now) if location.startswith("/") else now.as_uri()


def _stayed_behind(former: Path, runs: Iterable[str]) -> bool:
    """Whether the artifacts of these runs are in the former folder, and none are here."""
    paths = [path for location in runs if (path := local_path(location))]
    is_copied = any(Path(_relocated(str(path), former)).exists() for path in paths)
    return not is_copied and any(path.exists() for path in paths)


@functools.cache
def _warn_of_missing(former: Path) -> None:
    print(
        f"warning: mlflow.db was copied without its artifacts, which are still in {former}; copy them to "
        f"{root() / _FOLDER}, then run `gradtrail sync`",
        file=sys.stderr,
    )
