"""Which row of MLflow's store a person means: by its name or id, by a state, by an experiment of DVC, or by a file."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from mlflow.entities import Run

from gradtrail.io.digests import digest
from gradtrail.io.dvc_cache import listing
from gradtrail.io.errors import UserError, one_line
from gradtrail.io.identity import Identity
from gradtrail.io.snapshots import working_snapshot
from gradtrail.io.workspace import working_folder

_OUTPUT = "output/"
_BEGINNING = re.compile("[0-9a-f]{4,64}")  # of an id or a state


def look_up(what: str, rows: Iterable[Run]) -> list[Run]:
    """Return the rows that a word may mean, the newest first; where it means one exactly, that one alone.

    Args:
        what: a run's id or name, a state's key, the first four or more digits of an id or a key, the name of a DVC
            experiment, which stands for what it trained if it trained, or the path of a file or folder, wherever it
            lies: what counts is its content.
        rows: of the store, the newest first.

    Raises:
        UserError: nothing is meant; one line.
    """
    rows = list(rows)
    tests: list[Callable[[Run], bool]] = [
        lambda row: what in (row.info.run_id, row.data.tags.get("state")),
        lambda row: what == row.info.run_name,
        lambda row: what == row.data.tags.get("dvc.exp_name") and row.data.tags.get("stage") == "train",
        lambda row: what == row.data.tags.get("dvc.exp_name"),
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
    of_lock = [row for row in here if row.data.tags["state"] in _states_of_lock()]
    return of_lock or here or [row for row, _ in found.values()]


def outputs(row: Run) -> dict[str, str]:
    """Return the digest of each out that a row's state wrote."""
    tags = row.data.tags.items()
    return {name.removeprefix(_OUTPUT): found for name, found in tags if name.startswith(_OUTPUT)}


def _states_of_lock() -> set[str]:
    working = working_snapshot()
    if working is None:
        return set()
    stages = (Identity(name, from_lock=True, snapshot=working) for name in working.pipeline)
    return {stage.state for stage in stages if stage.is_sound}


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
