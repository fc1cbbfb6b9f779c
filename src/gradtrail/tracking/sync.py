"""Brings MLflow's store up to date: a run for every state that was made, headline metrics on every training's run.

If DVC skips or restores a stage, no code of this project runs; a sync closes that gap, by `backfill.py`. With nothing
to do it imports neither MLflow nor DVC: one digest covers all that a sync reads. A store that was moved counts as
changed until it is relocated; a server is always queried.
"""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping

from filelock import FileLock

from gradtrail.stages.common.dvc_cache import file_folder
from gradtrail.stages.common.files import digest, write_json
from gradtrail.stages.common.pipeline_file import FILES, sha256_of
from gradtrail.support.git import git, head_commit
from gradtrail.support.paths import SQLITE, database_path, private_folder, store_uri, working_folder
from gradtrail.tracking.dvc_history import find_experiments
from gradtrail.tracking.relocate import former_folders
from gradtrail.tracking.run_cache import entry_files

_PARTS = {  # texts of a report, by its keys; all other keys are stages, with the number of rebuilt runs
    "present": "{} runs present",
    "completed": "completed from their records: {}",
    "absent": "states whose files are not here: {}; "
    "`dvc checkout dvc.yaml`, or `dvc fetch --all-commits` with a remote, then sync again",
    "misrecorded": "recorded for other params or data than made them, so without a run: {}",
    "unreadable": "skipped, not readable: {}",
    "killed": "interrupted, marked as KILLED: {}",
    "replaced": "replaced by other runs: {}",
    "deleted": "kept deleted: {}",
    "elsewhere": "open on other hosts: {}",
}
_LASTING = ("absent", "misrecorded", "unreadable", "deleted", "elsewhere")  # what a sync with nothing to do says too


def sync() -> dict[str, int]:
    """Backfill the runs of all states, unless nothing has changed since the last sync; return a report for `describe`.

    Raises:
        UserError: git fails, or the `dvc.yaml` or `dvc.lock` of the working folder cannot be read.
    """
    sources, place = list(_sources()), private_folder() / "synced.json"  # later changes are for the next sync
    is_local, report = store_uri().startswith(SQLITE), dict[str, int]()
    if is_local:
        with contextlib.suppress(OSError, ValueError, sqlite3.Error):
            last = json.loads(place.read_bytes())
            report = last["report"] if last["key"] == _key(sources) and not former_folders(store_uri()) else {}
    if report:
        return report
    from gradtrail.tracking.backfill import backfill  # late: it imports MLflow

    with FileLock(private_folder() / "sync.lock"):
        report, is_complete = backfill()
        if is_local and is_complete:
            present = report["present"] + sum(count for key, count in report.items() if key not in _PARTS)
            lasting = {key: report.get(key, 0) for key in _LASTING} | {"present": present}
            write_json(place, {"key": _key(sources), "report": lasting})
        else:
            place.unlink(missing_ok=True)
    return report


def restore(name: str) -> dict[str, int]:
    """Bring back a run that a person deleted, and sync; return a report for `describe`."""
    sync()  # it notes what was deleted since the last one
    from gradtrail.tracking.deleted import require_run, restore_run  # late: it imports MLflow

    with FileLock(private_folder() / "sync.lock"):
        restored = restore_run(name)
        (private_folder() / "synced.json").unlink(missing_ok=True)
    report = sync()
    require_run(restored)
    return report


def describe(report: Mapping[str, int], *, verbose: bool = False) -> str:
    """Return a report as one line; states whose files are missing, as in a fresh clone, only if `verbose`."""
    rebuilt = [f"{key} ({count})" if count > 1 else key for key, count in report.items() if key not in _PARTS]
    keys = [key for key in _PARTS if key != "present" and report.get(key) and (verbose or key != "absent")]
    parts = [_PARTS[key].format(report[key]) for key in ("present", *keys)]
    return "; ".join([parts[0], *([f"rebuilt: {', '.join(rebuilt)}"] if rebuilt else []), *parts[1:]])


def _key(sources: list[object]) -> str:
    """Return a digest of all that a sync reads."""
    database = database_path(store_uri())
    files = [database, database.with_name(f"{database.name}-wal")]
    store = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]
    return sha256_of({"uri": store_uri(), "store": store, "sources": sources})


def _sources() -> Iterator[object]:
    """Yield values that identify the pipelines, locks and files that a sync reads."""
    for name in FILES:
        path = working_folder() / name
        yield digest(path) if path.is_file() else ""
    yield head_commit()
    refs = git("for-each-ref", "--format=%(objectname) %(refname)").splitlines()
    yield [line for line in refs if " refs/exps/" not in line]
    yield sorted((one.name, one.baseline, one.commit) for one in find_experiments())
    yield sorted(path.name for path in entry_files())
    yield sorted(str(path) for path in private_folder().glob("records/*/*"))
    with contextlib.suppress(OSError), os.scandir(file_folder()) as folders:
        yield sorted((folder.name, folder.stat().st_mtime_ns) for folder in folders)
