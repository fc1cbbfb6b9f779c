"""Which row of MLflow's store a person means: by its name or id, by a state, by an experiment of DVC, or by a file."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from mlflow.entities import Run

from gradtrail.stages.common.digests import digest
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.paths import working_folder
from gradtrail.tracking.lineage.dvc_cache import listing
from gradtrail.tracking.lineage.recorded import consistent_stages
from gradtrail.tracking.lineage.snapshots import find_experiments, snapshot_of, working_snapshot

_OUTPUT = "output/"
_BEGINNING = re.compile("[0-9a-f]{4,64}")  # of an id or a state


def look_up(what: str, rows: Iterable[Run]) -> list[Run]:
    """Return the rows that a word may mean, the newest first; where it means one exactly, that one alone.

    Args:
        what: a run's id or name, a state's key, the first four or more digits of an id or a key, the name of a DVC
            experiment, which stands for its training, or the path of a file or folder, wherever it
            lies: what counts is its content.
        rows: of the store, the newest first.

    Raises:
        UserError: nothing is meant; one line.
    """
    rows = [row for row in rows if "state" in row.data.tags]
    states = _states_of_experiment(what)
    tests: list[Callable[[Run], bool]] = [
        lambda row: what in (row.info.run_id, row.data.tags.get("state")),
        lambda row: what == row.info.run_name,
        lambda row: row.data.tags["state"] in states and row.data.tags["stage"] == "train",
        lambda row: what == row.data.tags.get("dvc.exp_name") and row.data.tags["stage"] == "train",
        lambda row: row.data.tags["state"] in states or what == row.data.tags.get("dvc.exp_name"),
    ]
    if _BEGINNING.fullmatch(what):
        tests.append(lambda row: any(key.startswith(what) for key in (row.info.run_id, row.data.tags.get("state", ""))))
    for test in tests:
        if found := [row for row in rows if test(row)]:
            return found
    if Path(what).exists():
        return writers(Path(what), rows)
    raise UserError(
        f"{one_line(what)[:100]}: no row has this name, id, state or experiment, and there is no such file; "
        "`gradtrail sync` gives every state its row"
    )


def writers(path: Path, rows: Iterable[Run]) -> list[Run]:
    """Return the rows of the states that wrote a file or folder, as the outs' digests say.

    Several may have written the same bytes: then those that wrote them to this very path, if there are some, and of
    those the one that `dvc.lock` has, if it has one.

    Raises:
        UserError: no row's state wrote these bytes.
    """
    wanted = digest(path)
    found = {row.info.run_id: (row, out) for row in rows if (out := _out_with(wanted, row))}
    if not found:
        raise UserError(f"{path}: no row's state wrote these bytes (md5 {wanted})")
    here = [row for row, out in found.values() if path.resolve() == (working_folder() / out).resolve()]
    working = working_snapshot()
    current = {stage.state for stage in consistent_stages(working)} if working else set()
    of_lock = [row for row in here if row.data.tags["state"] in current]
    return of_lock or here or [row for row, _ in found.values()]


def outputs(row: Run) -> dict[str, str]:
    """Return the digest of each out that a row's state wrote."""
    tags = row.data.tags.items()
    return {name.removeprefix(_OUTPUT): found for name, found in tags if name.startswith(_OUTPUT)}


def _states_of_experiment(name: str) -> set[str]:
    """Return the states that the newest experiment of a name has, also where a row names another one."""
    commits = [one.commit for one in find_experiments() if one.name == name]
    snapshot = snapshot_of(commits[-1]) if commits else None
    return {stage.state for stage in consistent_stages(snapshot)} if snapshot else set()


def _out_with(wanted: str, row: Run) -> str | None:
    """Return the path of the out, or of the file in an out, that has these bytes."""
    for out, found in outputs(row).items():
        if found == wanted:
            return out
        if found.endswith(".dir"):
            for name, md5 in (listing(found) or {}).items():
                if md5 == wanted:
                    return f"{out}/{name}"
    return None
