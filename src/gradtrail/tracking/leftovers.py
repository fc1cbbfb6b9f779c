"""Folders that killed stages leave behind, and the checkpoints of complete members, which other trainings reuse.

Out of scope: MLflow, which the stages that import this module do not import.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.paths import COMPLETE, private_folder, working_folder
from gradtrail.tracking.state import lock_file

KEPT_SECONDS = 30 * 86_400  # time that a run or folder is kept without use
_MAX_MEMBERS = 64  # checkpoints of complete members


def unused_folders(*, records: bool) -> Iterator[Path]:
    """Yield the checkpoints, unfinished outputs and, if asked for, records in which nothing has changed for 30 days.

    A stage that works on one of them changes it every few seconds, and a stopped one can resume for 30 days.
    """
    private = private_folder()
    patterns = ["resume/*-*", *(["records/*", "bad_records/*"] if records else [])]
    folders = [folder for pattern in patterns for folder in private.glob(pattern)]
    yield from (one for one in [*folders, *working_folder().glob(".outs/*")] if one.is_dir() and _is_unused(one))


def remove_unused(folder: Path) -> None:
    """Remove a folder unless a process uses it: one that has changed it, or that holds the lock of its state."""
    state = folder.name.partition("-")[0][:32]
    own_locks = {folder.with_name(f"{name}.lock") for name in (folder.name, folder.stem)}
    with contextlib.suppress(Timeout), contextlib.ExitStack() as stack:
        for lock in [*private_folder().glob(f"locks/*-{state}.lock"), *filter(Path.exists, own_locks)]:
            stack.enter_context(FileLock(lock).acquire(timeout=0))
        if _is_unused(folder):
            shutil.rmtree(folder)


def _is_unused(folder: Path) -> bool:
    changed = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time() - changed > KEPT_SECONDS


def forget_old_members() -> None:
    """Remove the checkpoints of complete members but for those that were used last, and those that are in use."""
    seals = [path / COMPLETE for path in (private_folder() / "resume").glob("*-*") if (path / COMPLETE).is_file()]
    for seal in sorted(seals, key=lambda path: path.stat().st_mtime, reverse=True)[_MAX_MEMBERS:]:
        state = seal.parent.name.partition("-")[0]
        with contextlib.suppress(Timeout), lock_file(TRAIN, state).acquire(timeout=0):
            shutil.rmtree(seal.parent)
