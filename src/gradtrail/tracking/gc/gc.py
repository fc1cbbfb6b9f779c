"""`gradtrail gc`: lists, then removes, what belongs to no recorded state, such as runs, artifacts and checkpoints.

A state is recorded by the working folder's `dvc.lock`, by a commit of any branch or tag, by an experiment, or by an
entry of the run-cache whose files DVC's cache still has; so after `gradtrail gc`, `gradtrail sync` has nothing to
rebuild. Out of scope: DVC's cache, which `dvc gc` cleans, and the cache of compiled functions.
"""

import contextlib
import sys
from pathlib import Path

from filelock import FileLock
from rich.filesize import decimal
from rich.table import Table

from gradtrail.stages.common.dvc_cache import cache_folder
from gradtrail.support.errors import UserError
from gradtrail.support.git import GitError, git, is_in_repository
from gradtrail.support.paths import private_folder, store_uri, working_folder
from gradtrail.support.progress import stdout_console
from gradtrail.tracking.gc.files import (
    Garbage,
    checkpoints,
    leftover_outs,
    open_checkpoints,
    stale_cache,
    unused_locks,
)
from gradtrail.tracking.lineage.recorded import (
    RecordedStates,
    consistent_stages,
    entry_files,
    has_files,
    last_stage,
    recorded_states,
)
from gradtrail.tracking.mlflow.relocate import own_database
from gradtrail.tracking.sync.sync import sync

_LAST_LINE = "DVC's cache is unchanged; after `dvc gc`, `gradtrail gc` removes the runs of what was deleted from it."


def collect_garbage(*, yes: bool) -> None:
    """List what belongs to no recorded state; remove it after a confirmation.

    Args:
        yes: remove without asking; otherwise ask on a terminal, and remove nothing without one.

    Raises:
        UserError: what is recorded cannot be read completely.
    """
    _require_repository()
    if _database() is None:
        print("runs are kept: other clones may use this store")
    elif _has_runs():
        sync()  # rebuild what has no run yet, so that a run which represents several states is known as such
    recorded = recorded_states()
    found = _find(recorded)
    if not found:
        print(f"nothing to remove. {_LAST_LINE}")
        return
    stdout_console().print(_as_table(found))
    if recorded.num_unreadable:
        print(f"{recorded.num_unreadable} commits cannot be read; the list above may include what only they refer to")
    if yes or _agrees():
        print(_remove({(one.what, one.name) for one in found}))
    elif not _is_terminal():
        print("nothing removed: not interactive; pass --yes")
    print(_LAST_LINE)


def _find(recorded: RecordedStates) -> list[Garbage]:
    runs, states, complete = _of_runs(recorded) if _has_runs() else _without_runs(recorded)
    resumable = open_checkpoints(complete)
    keys = [*(snapshot.key for snapshot in recorded.snapshots), *(path.name for path in entry_files())]
    files = [*leftover_outs(), *checkpoints(complete), *stale_cache(keys), *unused_locks(states | resumable)]
    return runs + files


def _of_runs(recorded: RecordedStates) -> tuple[list[Garbage], set[str], set[str]]:
    """Return the garbage in the store; the keys of the states that have runs or are recorded; and of complete ones."""
    from gradtrail.tracking.gc import runs  # late: it imports MLflow

    client, index = runs.open_index()
    kept = runs.live_references(client, recorded, index)
    complete = _trained_states(recorded) | {run.data.tags.get("state", "") for run in index({}, finished=True)}
    to_go = runs.unreferenced_runs(index, kept, open_checkpoints(complete))
    if to_go:
        _require_records(recorded)
    gone = {run.info.run_id for run in to_go}
    states = {run.data.tags.get("state", "") for run in index.runs() if run.info.run_id not in gone}
    found = [*runs.as_garbage(client, to_go), *runs.ownerless_artifacts()]
    return found, kept.states | states, complete


def _without_runs(recorded: RecordedStates) -> tuple[list[Garbage], set[str], set[str]]:
    stages = [stage for snapshot in recorded.snapshots for stage in consistent_stages(snapshot)]
    states = {stage.state for stage in [*stages, *map(last_stage, recorded.only_in_run_cache(lambda _: False))]}
    return [], states, _trained_states(recorded)


def _trained_states(recorded: RecordedStates) -> set[str]:
    """Return the trained states whose files are here: a lock may name others, which were made on another machine."""
    stages = (stage for snapshot in recorded.snapshots for stage in consistent_stages(snapshot))
    return {stage.state for stage in stages if stage.name == "train" and has_files(stage)}


def _remove(shown: set[tuple[str, str]]) -> str:
    """Remove what was listed and is still garbage; return a line that says how much."""
    database = _database()
    with FileLock(private_folder() / "sync.lock"):
        chosen = [one for one in _find(recorded_states()) if (one.what, one.name) in shown]
        for one in chosen:
            one.remove()
        said = f"removed: {len(chosen)}, {decimal(sum(one.size_bytes for one in chosen))}"
        if database and any(one.what == "run" for one in chosen):
            from gradtrail.tracking.gc.runs import shrink  # late: it imports MLflow

            said += f"; {database.name} is smaller by {decimal(shrink(database))}"
    return said


def _as_table(found: list[Garbage]) -> Table:
    table = Table(title="not referenced by any recorded state", show_footer=True)
    table.add_column("what", "total")
    table.add_column("name", str(len(found)), overflow="fold")
    table.add_column("why")
    table.add_column("size", decimal(sum(one.size_bytes for one in found)), justify="right")
    for one in found:
        table.add_row(one.what, one.name, one.why, decimal(one.size_bytes))
    return table


def _agrees() -> bool:
    """Ask for confirmation, if there is a terminal."""
    with contextlib.suppress(EOFError):
        return _is_terminal() and input("Remove all this? [y/N] ").strip().lower() in ("y", "yes")
    return False


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _database() -> Path | None:
    """Return this repository's own database, if that is the store."""
    return own_database(store_uri())


def _has_runs() -> bool:
    database = _database()
    return database is not None and database.exists()


def _require_repository() -> None:
    """Refuse to go on where git cannot tell what is recorded.

    Raises:
        UserError: this is no repository's root, or git fails although there is a repository.
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
        raise UserError("there is a repository, but no git; its commits may record states")


def _require_records(recorded: RecordedStates) -> None:
    """Refuse to remove runs where nothing is recorded at all: the records were lost, rather than the runs left over.

    Raises:
        UserError: there is no lock anywhere, or no cache of DVC's.
    """
    if not recorded.snapshots:
        raise UserError("no dvc.lock here nor in any commit, so it is unknown which runs are still needed")
    if not cache_folder().is_dir():
        raise UserError(f"DVC's cache is missing ({cache_folder()}), so it is unknown which runs are still needed")
