"""What `gradtrail gc` may remove beside runs: checkpoints, leftovers of killed stages, stale caches and lock files.

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
from gradtrail.tracking.lineage.snapshots import stale_cache_files

MOST_MEMBERS = 64  # checkpoints of complete members, which trainings with other members take up
KEPT_DAYS = 30  # how long a checkpoint is kept from which a training could resume
PREFIX = 32  # digits of a state's key in names of files


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """Something that can be removed.

    Attributes:
        what: its kind.
        name: unique among its kind.
        why: the reason.
        size_bytes: of its files.
        remove: removes it; where that was interrupted, the next time finds and removes the rest.
    """

    what: str
    name: str
    why: str
    size_bytes: int
    remove: Callable[[], None]


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; 0 where there is none."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file())


def open_checkpoints(complete: Collection[str]) -> set[str]:
    """Return the states whose training could resume, by the first digits of their keys.

    Args:
        complete: keys of complete states.
    """
    made = _prefixes(complete)
    folders = [folder for folder in _checkpoint_folders() if not _reason(folder, made)]
    return {state for folder in folders for state in (_state_of(folder), _user_of(folder)) if state}


def checkpoints(complete: Collection[str]) -> Iterator[Garbage]:
    """Yield checkpoints of trainings that are complete, or that were stopped long ago."""
    made = _prefixes(complete)
    for folder in _checkpoint_folders():
        lock = _locks() / f"train-{_state_of(folder)}.lock"
        if (why := _reason(folder, made)) and _is_free(lock):
            yield Garbage(
                what="checkpoint",
                name=folder.name,
                why=why,
                size_bytes=size_of(folder),
                remove=functools.partial(_remove_under, lock, folder),
            )


def forget_old_members() -> None:
    """Remove the checkpoints of complete members but for those that were used last, and those that are in use."""
    folders = [folder for folder in _checkpoint_folders() if (folder / COMPLETE).is_file()]
    for folder in sorted(folders, key=lambda folder: _time_of(folder / COMPLETE), reverse=True)[MOST_MEMBERS:]:
        with contextlib.suppress(OSError):
            _remove_under(_locks() / f"train-{_state_of(folder)}.lock", folder)


def leftover_outs() -> Iterator[Garbage]:
    """Yield the unfinished outs of stages that were killed."""
    for folder in sorted(path for path in (working_folder() / ".outs").glob("*") if path.is_dir()):
        lock = folder.with_name(f"{folder.name.removesuffix('.old')}.lock")
        if _is_free(lock):
            yield Garbage(
                what="leftover",
                name=f".outs/{folder.name}",
                why="of a stage that was killed while it wrote",
                size_bytes=size_of(folder),
                remove=functools.partial(_remove_under, lock, folder),
            )


def stale_cache(keys: Collection[str]) -> Iterator[Garbage]:
    """Yield, as one, the parsed contents of locks and run-cache entries that no longer exist.

    Args:
        keys: of those that exist.
    """
    if files := stale_cache_files(keys):
        yield Garbage(
            what="parsed files",
            name=".gradtrail/parsed",
            why=f"{len(files)} of locks and run-cache entries that no longer exist",
            size_bytes=sum(map(size_of, files)),
            remove=functools.partial(_remove_files, files),
        )


def unused_locks(states: Collection[str]) -> Iterator[Garbage]:
    """Yield, as one, the lock files of states that are not recorded.

    Args:
        states: keys, or the first digits of keys, of those that are recorded or have a run.
    """
    known = _prefixes(states)
    files = [path for path in sorted(_locks().glob("*-*.lock")) if path.stem.rpartition("-")[2] not in known]
    if files := [path for path in files if _is_free(path)]:
        yield Garbage(
            what="lock files",
            name=".gradtrail/locks",
            why=f"{len(files)} of states that are not recorded",
            size_bytes=0,
            remove=functools.partial(_remove_locks, files),
        )


def _reason(folder: Path, complete: set[str]) -> str:
    """Return why a folder of checkpoints can be removed; empty where it is to be kept."""
    is_kept = (folder / COMPLETE).is_file()
    if _state_of(folder) in complete and not is_kept:
        return "its training is complete"
    last = max((path.stat().st_mtime for path in [folder, *folder.iterdir()]), default=0.0)
    days = (time.time() - last) / 86_400
    if days <= KEPT_DAYS:
        return ""
    return f"a member that was not used for {days:.0f} days" if is_kept else f"stopped {days:.0f} days ago"


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


def _prefixes(states: Collection[str]) -> set[str]:
    return {state[:PREFIX] for state in states}


def _locks() -> Path:
    return private_folder() / "locks"


def _is_free(lock: Path) -> bool:
    """Whether no process holds a lock."""
    with contextlib.suppress(Timeout):
        if lock.exists():
            FileLock(lock, timeout=0).acquire().lock.release()
        return True
    return False


def _remove_under(lock: Path, path: Path) -> None:
    """Remove a file or folder under a lock; leave it where another process holds the lock by now."""
    was_there = lock.exists()
    lock.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
        if path.is_dir():
            shutil.rmtree(path)
        if path == lock or not was_there:
            lock.unlink(missing_ok=True)


def _remove_files(files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _remove_locks(files: list[Path]) -> None:
    for file in files:
        _remove_under(file, file)
