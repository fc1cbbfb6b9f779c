"""Files that `gradtrail gc` may remove: checkpoints, and leftovers of killed stages.

A checkpoint is useless once its training is complete, unless it is kept for trainings with other members. That of a
training that was stopped is kept, with its run, for 30 days, as nothing else has that work. Files that a process works
on are under a lock, and are left alone.
"""

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from gradtrail.support.paths import COMPLETE, USER, private_folder, working_folder

MAX_MEMBERS = 64  # checkpoints of complete members, which trainings with other members reuse
KEPT_DAYS = 30  # time that a checkpoint is kept from which a training could resume
PREFIX = 32  # digits of a state's key in names of files


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """Something that can be removed."""

    category: str
    name: str
    why: str
    size_bytes: int
    remove: Callable[[], None]  # if it is interrupted, the next `gradtrail gc` finds and removes the rest


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; 0 if there is none."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file())


def open_checkpoints(complete: Collection[str]) -> set[str]:
    """Return the states whose training could resume, by the first digits of their keys.

    Args:
        complete: Keys of complete states.
    """
    finished = {state[:PREFIX] for state in complete}
    folders = [folder for folder in _checkpoint_folders() if not _reason(folder, finished)]
    return {state for folder in folders for state in (_state_of(folder), _user_of(folder)) if state}


def checkpoints(complete: Collection[str]) -> Iterator[Garbage]:
    """Yield the checkpoints of trainings that are complete, or that were stopped long ago.

    Args:
        complete: Keys of complete states.
    """
    finished = {state[:PREFIX] for state in complete}
    for folder in _checkpoint_folders():
        if why := _reason(folder, finished):
            yield from _unless_locked("checkpoint", folder.name, why, folder, _lock_of(folder))


def forget_old_members() -> None:
    """Remove the checkpoints of complete members but for those that were used last, and those that are in use."""
    folders = [folder for folder in _checkpoint_folders() if (folder / COMPLETE).is_file()]
    for folder in sorted(folders, key=lambda folder: _time_of(folder / COMPLETE), reverse=True)[MAX_MEMBERS:]:
        with contextlib.suppress(OSError):
            _remove_under(_lock_of(folder), folder)


def leftover_outs() -> Iterator[Garbage]:
    """Yield the unfinished outputs of stages that were killed."""
    for folder in sorted(path for path in (working_folder() / ".outs").glob("*") if path.is_dir()):
        lock = folder.with_name(f"{folder.name.removesuffix('.old')}.lock")
        yield from _unless_locked(
            "leftover", f".outs/{folder.name}", "of a stage that was killed while it wrote", folder, lock
        )


def _unless_locked(category: str, name: str, why: str, folder: Path, lock: Path) -> Iterator[Garbage]:
    """Yield a folder as garbage, unless a process holds its lock."""
    with contextlib.suppress(Timeout):
        if lock.exists():
            FileLock(lock, timeout=0).acquire().lock.release()
        remove = functools.partial(_remove_under, lock, folder)
        yield Garbage(category=category, name=name, why=why, size_bytes=size_of(folder), remove=remove)


def _reason(folder: Path, complete: set[str]) -> str:
    """Return why a folder of checkpoints can be removed; empty if it is to be kept."""
    is_member = (folder / COMPLETE).is_file()
    if _state_of(folder) in complete and not is_member:
        return "its training is complete"
    last = max((path.stat().st_mtime for path in [folder, *folder.iterdir()]), default=0.0)
    days = (time.time() - last) / 86_400
    if days <= KEPT_DAYS:
        return ""
    return f"a member that was not used for {days:.0f} days" if is_member else f"stopped {days:.0f} days ago"


def _checkpoint_folders() -> list[Path]:
    return sorted(path for path in (private_folder() / "resume").glob("*-*") if path.is_dir())


def _state_of(folder: Path) -> str:
    return folder.name.partition("-")[0]


def _user_of(folder: Path) -> str:
    """Return the first digits of the state that was made last from a folder of checkpoints; empty if unknown."""
    try:
        return (folder / USER).read_text(encoding="utf-8")[:PREFIX]
    except (OSError, ValueError):
        return ""


def _time_of(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _lock_of(folder: Path) -> Path:
    return private_folder() / "locks" / f"train-{_state_of(folder)}.lock"


def _remove_under(lock: Path, folder: Path) -> None:
    """Remove a folder under a lock; leave it if another process holds the lock by now."""
    was_there = lock.exists()
    lock.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
        shutil.rmtree(folder)
        if not was_there:
            lock.unlink(missing_ok=True)
