"""Folders that killed stages leave behind, and the checkpoints of complete members, which other trainings reuse.

Out of scope: MLflow, which the stages that import this module do not import.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import Timeout

from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.paths import COMPLETE, private_folder, working_folder
from gradtrail.tracking.state import lock_file

KEPT_SECONDS = 30 * 86_400  # time that a run or folder is kept without use
_MAX_MEMBERS = 64  # checkpoints of complete members


def unused_folders() -> Iterator[Path]:
    """Yield the checkpoints, records and unfinished outputs in which nothing has changed for 30 days.

    A stage that works on one of them changes it every few seconds, and a stopped one can resume for 30 days.
    """
    private = private_folder()
    for folder in [*private.glob("resume/*-*"), *private.glob("records/*"), *working_folder().glob(".outs/*")]:
        if folder.is_dir():
            changed = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
            if time.time() - changed > KEPT_SECONDS:
                yield folder


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 if there is none."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def forget_old_members() -> None:
    """Remove the checkpoints of complete members but for those that were used last, and those that are in use."""
    seals = [path / COMPLETE for path in (private_folder() / "resume").glob("*-*") if (path / COMPLETE).is_file()]
    for seal in sorted(seals, key=lambda path: path.stat().st_mtime, reverse=True)[_MAX_MEMBERS:]:
        state = seal.parent.name.partition("-")[0]
        with contextlib.suppress(Timeout), lock_file(TRAIN, state).acquire(timeout=0):
            shutil.rmtree(seal.parent)
