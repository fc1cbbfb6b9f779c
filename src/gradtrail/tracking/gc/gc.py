"""`gradtrail gc`: shows, then removes, what no state refers to: rows and artifacts, checkpoints, leftovers, old locks.

What refers to a state: the working folder's `dvc.lock`, a commit of any branch or tag, an experiment, or an entry of
the run-cache whose files DVC's cache still has; so after a `gradtrail gc` a `gradtrail sync` has nothing to make again.
DVC's cache itself is `dvc gc`'s to clean, and compiled functions stay.
"""

import contextlib
import sys
from pathlib import Path

from filelock import FileLock
from rich.filesize import decimal
from rich.table import Table

from gradtrail.support.errors import UserError
from gradtrail.support.git import git
from gradtrail.support.paths import private_folder, root, store_uri, working_folder
from gradtrail.support.progress import stdout_console
from gradtrail.tracking.gc.files import (
    Garbage,
    checkpoints,
    leftover_outs,
    open_checkpoints,
    remembered_of_nothing,
    unused_locks,
)
from gradtrail.tracking.lineage.dvc_cache import cache_folder
from gradtrail.tracking.lineage.recorded import (
    Recorded,
    consistent_stages,
    entry_files,
    has_files,
    last_stage,
    recorded_snapshots,
)
from gradtrail.tracking.mlflow.relocate import own_database
from gradtrail.tracking.sync.sync import sync

_LAST_LINE = "DVC's own cache is not touched: `dvc gc` cleans it, and what it drops there goes here the next time."


def collect_garbage(*, yes: bool) -> None:
    """Show what nothing refers to; remove it if the person says so.

    Args:
        yes: remove without asking; otherwise it is asked on a terminal, and nothing is removed without one.

    Raises:
        UserError: it cannot be told what is referred to.
    """
    _require_ground()
    if _database() is None:
        print("rows are left alone: those of a server, or of a database elsewhere, may be of other clones")
    elif _has_rows():
        sync()  # what has no row yet gets it: a row that stands for several states is then known as such
    recorded = recorded_snapshots()
    found = _find(recorded)
    if not found:
        print(f"nothing to remove. {_LAST_LINE}")
        return
    stdout_console().print(_as_table(found))
    if recorded.num_unreadable:
        print(f"not read, so what only they refer to is above: {recorded.num_unreadable} commits of another shape")
    if yes or _agrees():
        print(_remove({(one.what, one.name) for one in found}))
    elif not _is_terminal():
        print("nothing was removed: this is no terminal to ask on; `gradtrail gc --yes` removes it")
    print(_LAST_LINE)


def _find(recorded: Recorded) -> list[Garbage]:
    rows, states, complete = _of_rows(recorded) if _has_rows() else _without_rows(recorded)
    resumable = open_checkpoints(complete)
    keys = [*(snapshot.key for snapshot in recorded.snapshots), *(path.name for path in entry_files())]
    files = [*leftover_outs(), *checkpoints(complete), *remembered_of_nothing(keys), *unused_locks(states | resumable)]
    return rows + files


def _of_rows(recorded: Recorded) -> tuple[list[Garbage], set[str], set[str]]:
    """Return what goes of the store; the states that something refers to; and those that are made."""
    from gradtrail.tracking.gc import runs  # late: it imports MLflow

    client, index = runs.open_index()
    kept = runs.referred(recorded, index)
    complete = _made(recorded) | {row.data.tags.get("state", "") for row in index({}, finished=True)}
    to_go = runs.rows_to_go(index, kept, open_checkpoints(complete))
    if to_go:
        _require_records(recorded)
    gone = {row.info.run_id for row in to_go}
    states = {row.data.tags.get("state", "") for row in index.rows() if row.info.run_id not in gone}
    found = [*runs.as_garbage(client, to_go), *runs.ownerless_artifacts()]
    return found, kept.states | states, complete


def _without_rows(recorded: Recorded) -> tuple[list[Garbage], set[str], set[str]]:
    stages = [stage for snapshot in recorded.snapshots for stage in consistent_stages(snapshot)]
    states = {stage.state for stage in [*stages, *map(last_stage, recorded.only_ran(lambda _: False))]}
    return [], states, _made(recorded)


def _made(recorded: Recorded) -> set[str]:
    """Return the trained states whose files are here: a lock may name others, that are yet to be made here."""
    stages = (stage for snapshot in recorded.snapshots for stage in consistent_stages(snapshot))
    return {stage.state for stage in stages if stage.name == "train" and has_files(stage)}


def _remove(shown: set[tuple[str, str]]) -> str:
    """Remove what was shown and is still to go; say what came of it."""
    database = _database()
    with FileLock(private_folder() / "sync.lock"):
        chosen = [one for one in _find(recorded_snapshots()) if (one.what, one.name) in shown]
        for one in chosen:
            one.remove()
        said = f"removed: {len(chosen)}, {decimal(sum(one.size_bytes for one in chosen))}"
        if database and any(one.what == "row" for one in chosen):
            from gradtrail.tracking.gc.runs import shrink  # late: it imports MLflow

            said += f"; {database.name} is smaller by {decimal(shrink(database))}"
    return said


def _as_table(found: list[Garbage]) -> Table:
    table = Table(title="what no state refers to", show_footer=True)
    table.add_column("what", "total")
    table.add_column("name", str(len(found)), overflow="fold")
    table.add_column("why")
    table.add_column("size", decimal(sum(one.size_bytes for one in found)), justify="right")
    for one in found:
        table.add_row(one.what, one.name, one.why, decimal(one.size_bytes))
    return table


def _agrees() -> bool:
    """Ask, where there is somebody to ask."""
    with contextlib.suppress(EOFError):
        return _is_terminal() and input("Remove all this? [y/N] ").strip().lower() in ("y", "yes")
    return False


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _database() -> Path | None:
    """Return this repository's own database, if that is the store."""
    return own_database(store_uri())


def _has_rows() -> bool:
    database = _database()
    return database is not None and database.exists()


def _require_ground() -> None:
    """Refuse to judge where what refers to states cannot be read.

    Raises:
        UserError: this is no repository's root, or git does not answer although there is a repository.
    """
    if not (working_folder() / "dvc.yaml").is_file():
        raise UserError(f"{working_folder()}: no dvc.yaml here; run it in the repository's root")
    if git("rev-parse", "--verify", "--quiet", "HEAD") and not git("rev-list", "--all", "--count"):
        raise UserError("git cannot read all commits here, so nobody can tell what they refer to; try `git fsck`")
    has_git = any((folder / ".git").exists() for folder in (root(), *root().parents))
    if has_git and not git("rev-parse", "--git-dir"):
        raise UserError("git does not answer here, so nobody can tell what commits refer to; try `git status`")


def _require_records(recorded: Recorded) -> None:
    """Refuse to remove rows where nothing is recorded at all: that is rather a loss than garbage.

    Raises:
        UserError: there is no lock anywhere, or DVC's cache is not there.
    """
    if not recorded.snapshots:
        raise UserError("no dvc.lock here nor in any commit, so nobody can tell what is referred to")
    if not cache_folder().is_dir():
        raise UserError(f"DVC's cache is not there ({cache_folder()}), so nobody can tell what is referred to")
