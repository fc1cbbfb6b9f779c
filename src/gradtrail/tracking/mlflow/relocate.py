"""A store whose repository was moved or copied: MLflow keeps absolute locations, and they are led to the new place.

Only of the database in this repository's root, whose artifacts lie in `mlruns/` beside it. Locations of others (another
folder, a server, a bucket) stay as they are. Out of scope: a database elsewhere, which may be of several clones.
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
_OURS = "select experiment_id, artifact_location from experiments where name in ('data', 'models') or experiment_id = 0"
_TRACE_KEYS = "key in ('mlflow.artifactLocation', 'mlflow.trace.archiveLocation')"
_LOCATIONS = (  # table, column, which of its rows
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
    """Return the path that a location of MLflow's names: a `file:` URI or an absolute path; None for any other."""
    parts = urlparse(location)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    return Path(location) if location.startswith("/") else None


def is_moved(uri: str) -> bool:
    """Whether a store is this repository's, and says that its artifacts are elsewhere: one query tells."""
    database = own_database(uri)
    return database is not None and len(_former_folders(database)) > 0


def relocate_artifacts(uri: str) -> None:
    """Let all locations in a former artifact folder name this repository's, in one transaction, and say so on stderr.

    Locations stay, with a warning, where the artifacts did not come along but are still in the former place. Whoever
    calls holds the store's lock.
    """
    database = database_path(uri)
    for former in sorted(_former_folders(database)):
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as store:
            store.execute("begin immediate")
            found = list(_locations_below(store, former))
            if _stayed_behind(former, (location for table, _, _, location in found if table == "runs")):
                _warn_of_missing(former)
                continue
            for table, column, row, location in found:
                change = f"update {table} set {column} = ? where rowid = ?"  # noqa: S608 - both are named above
                store.execute(change, (_led(location, former), row))
            store.execute("commit")
        number = sum(table == "runs" for table, *_ in found)
        print(f"moved or copied from {former.parent}: MLflow's rows ({number}) now name {root()}", file=sys.stderr)


def _former_folders(database: Path) -> set[Path]:
    """Return the artifact folders, other than this repository's, that a database's experiments name."""
    with contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as store:
        found = {_folder_of(experiment, location) for experiment, location in store.execute(_OURS)}
    here = root() / _FOLDER
    return {folder for folder in found if folder and folder != here and folder.resolve() != here.resolve()}


def _folder_of(experiment: int, location: str) -> Path | None:
    """Return the artifact folder that an experiment's location tells of; MLflow gives its first one a folder below."""
    path = local_path(location or "")
    if path is not None and experiment == 0:
        path = path.parent if path.name == "0" else None
    return path if path is not None and path.name == _FOLDER else None


def _locations_below(store: sqlite3.Connection, folder: Path) -> Iterator[tuple[str, str, int, str]]:
    """Yield table, column, row and location of all that lies in a folder."""
    for table, column, condition in _LOCATIONS:
        if store.execute("select 1 from pragma_table_info(?) where name = ?", (table, column)).fetchone():
            query = f"select rowid, {column} from {table} where {column} is not null and {condition}"  # noqa: S608
            for row, location in store.execute(query).fetchall():
                if (path := local_path(location)) and path.is_relative_to(folder):
                    yield table, column, row, location


def _led(location: str, former: Path) -> str:
    """Return where a location in the former folder is now, in the form that it had."""
    path = local_path(location)
    assert path is not None  # noqa: S101 - it was found to lie in the folder
    now = root() / _FOLDER / path.relative_to(former)
    return str(now) if location.startswith("/") else now.as_uri()


def _stayed_behind(former: Path, runs: Iterable[str]) -> bool:
    """Whether rows have artifacts in the former place, and none here."""
    paths = [path for location in runs if (path := local_path(location))]
    here = any(Path(_led(str(path), former)).exists() for path in paths)
    return not here and any(path.exists() for path in paths)


@functools.cache
def _warn_of_missing(former: Path) -> None:
    print(
        f"warning: mlflow.db came here without its artifacts, which still lie in {former}; copy them to "
        f"{root() / _FOLDER}, then `gradtrail sync`",
        file=sys.stderr,
    )
