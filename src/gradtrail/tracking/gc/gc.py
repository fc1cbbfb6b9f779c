"""`gradtrail gc`: lists, then removes, what belongs to no recorded state: runs, checkpoints and leftovers.

A state is recorded by the working folder's `dvc.lock`, by a commit of any branch or tag, by an experiment, or by an
entry of the run-cache whose files DVC's cache still has; so after `gradtrail gc`, `gradtrail sync` has nothing to
rebuild. Out of scope: DVC's cache, which `dvc gc` cleans, and the cache of compiled functions.
"""

import contextlib
import sys

from filelock import FileLock
from mlflow import MlflowClient
from rich.filesize import decimal
from rich.table import Table

from gradtrail.stages.common.dvc_cache import cache_folder
from gradtrail.support.errors import UserError
from gradtrail.support.git import GitError, git, is_in_repository
from gradtrail.support.paths import private_folder, store_uri, working_folder
from gradtrail.support.progress import stdout_console
from gradtrail.tracking.gc.files import Garbage, checkpoints, leftover_outs, open_checkpoints
from gradtrail.tracking.gc.runs import deleted_garbage, needed_runs, purge, unneeded_garbage
from gradtrail.tracking.lineage.recorded import RecordedStates, consistent_stages, has_files, recorded_states
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.relocate import own_database
from gradtrail.tracking.mlflow.search import RunIndex
from gradtrail.tracking.sync import sync

_LAST_LINE = "DVC's cache is unchanged; after `dvc gc`, `gradtrail gc` removes the runs of what was deleted from it."


def collect_garbage(*, yes: bool) -> None:
    """List what belongs to no recorded state; remove it after a confirmation.

    Args:
        yes: True if it is removed without a question; else a person is asked on a terminal, and without a terminal
            nothing is removed.

    Raises:
        UserError: The recorded states cannot be read completely.
    """
    _require_repository()
    client = None
    if (database := own_database(store_uri())) is None:
        print("runs are kept: other clones may use this store")
    elif database.exists():
        sync()  # rebuild what has no run yet, so that a run which represents several states is known as such
        client = open_store()
    recorded = recorded_states()
    garbage = _find(recorded, client)
    if not garbage:
        print(f"nothing to remove. {_LAST_LINE}")
        return
    stdout_console().print(_as_table(garbage))
    if recorded.num_unreadable:
        print(f"{recorded.num_unreadable} commits cannot be read; the list above may include what only they refer to")
    if yes or _agrees():
        with FileLock(private_folder() / "sync.lock"):
            for item in garbage:
                item.remove()
            if client:
                purge(client)
        print(f"removed: {len(garbage)}, {decimal(sum(item.size_bytes for item in garbage))}")
    elif not _is_terminal():
        print("nothing removed: not interactive; pass --yes")
    print(_LAST_LINE)


def _find(recorded: RecordedStates, client: MlflowClient | None) -> list[Garbage]:
    """Return the garbage in the store, if there is a client of it, and among the files."""
    complete, runs = _trained_states(recorded), list[Garbage]()
    if client:
        index = RunIndex(client)
        complete |= {run.data.tags.get("state", "") for run in index({}, finished=True)}
        needed, resumable = needed_runs(client, recorded, index), open_checkpoints(complete)
        unneeded = list(unneeded_garbage(client, index, needed, resumable))
        if unneeded:
            _require_records(recorded)
        runs = [*unneeded, *deleted_garbage(client)]
    return [*runs, *leftover_outs(), *checkpoints(complete)]


def _trained_states(recorded: RecordedStates) -> set[str]:
    """Return the trained states whose files are here: a lock may name others, which were made on another machine."""
    stages = (stage for snapshot in recorded.snapshots for stage in consistent_stages(snapshot))
    return {stage.state for stage in stages if stage.name == "train" and has_files(stage)}


def _as_table(garbage: list[Garbage]) -> Table:
    table = Table(title="not referenced by any recorded state", show_footer=True)
    table.add_column("what", "total")
    table.add_column("name", str(len(garbage)), overflow="fold")
    table.add_column("why")
    table.add_column("size", decimal(sum(item.size_bytes for item in garbage)), justify="right")
    for item in garbage:
        table.add_row(item.category, item.name, item.why, decimal(item.size_bytes))
    return table


def _agrees() -> bool:
    """Ask for confirmation, if there is a terminal."""
    with contextlib.suppress(EOFError):
        return _is_terminal() and input("Remove all this? [y/N] ").strip().lower() in ("y", "yes")
    return False


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _require_repository() -> None:
    """Refuse to go on if git cannot read what is recorded.

    Raises:
        UserError: This is not the root of a repository, or git fails although there is a repository.
    """
    if not (working_folder() / "dvc.yaml").is_file():
        raise UserError(f"{working_folder()}: no dvc.yaml here; run it in the repository's root")
    try:
        git("rev-list", "--all", "--count")
    except GitError as error:
        raise UserError(
            f"git cannot read all commits, which may record states ({error}); try `git status` and `git fsck`"
        ) from error
    if is_in_repository() and not git("rev-parse", "--git-dir"):
        raise UserError("git is not installed, so the commits, which may record states, cannot be read")


def _require_records(recorded: RecordedStates) -> None:
    """Refuse to remove runs if nothing is recorded at all: then the records were lost, the runs are not left over.

    Raises:
        UserError: There is no lock anywhere, or DVC's cache is missing.
    """
    if not recorded.snapshots:
        raise UserError("no dvc.lock here nor in any commit, so it is unknown which runs are still needed")
    if not cache_folder().is_dir():
        raise UserError(f"DVC's cache is missing ({cache_folder()}), so it is unknown which runs are still needed")
