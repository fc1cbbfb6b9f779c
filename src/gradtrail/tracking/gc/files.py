"""What `gradtrail gc` may remove beside rows: checkpoints, leftovers of killed stages, what is remembered of nothing.

A checkpoint serves nothing once its training is complete. One of a training that was stopped stays, with its row, for
30 days, as it holds work that nothing else has. What a process is at work on has a held lock, and is left alone.
"""

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from gradtrail.support.paths import private_folder, working_folder
from gradtrail.tracking.lineage.snapshots import stale_cache_files

KEPT_DAYS = 30  # of checkpoints that a training could go on from
PREFIX = 32  # digits of a state's key in names of files


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One thing that nothing refers to.

    Attributes:
        what: its kind.
        name: which one; the only one of its kind.
        why: it goes.
        size_bytes: of its files.
        remove: removes it; what was half removed is found, and removed, the next time.
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
    """Return the states, by the first digits of their keys, that a training could go on with.

    Args:
        complete: keys of states that are made.
    """
    made = _prefixes(complete)
    return {_state_of(folder) for folder in _checkpoint_folders() if not _why(folder, made)}


def checkpoints(complete: Collection[str]) -> Iterator[Garbage]:
    """Yield checkpoints of trainings that are complete, or that nobody went on with for long."""
    made = _prefixes(complete)
    for folder in _checkpoint_folders():
        lock = _locks() / f"train-{_state_of(folder)}.lock"
        if (why := _why(folder, made)) and _is_free(lock):
            yield Garbage(
                what="checkpoint",
                name=folder.name,
                why=why,
                size_bytes=size_of(folder),
                remove=functools.partial(_remove_under, lock, folder),
            )


def leftover_outs() -> Iterator[Garbage]:
    """Yield what stages that were killed had written."""
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


def remembered_of_nothing(keys: Collection[str]) -> Iterator[Garbage]:
    """Yield, as one, what is remembered of locks and entries that are nowhere any more.

    Args:
        keys: of those that are somewhere.
    """
    if files := stale_cache_files(keys):
        yield Garbage(
            what="remembered",
            name=".gradtrail/parsed",
            why=f"{len(files)} of locks and run-cache entries that are nowhere",
            size_bytes=sum(map(size_of, files)),
            remove=functools.partial(_remove_files, files),
        )


def unused_locks(states: Collection[str]) -> Iterator[Garbage]:
    """Yield, as one, the lock files of states that nothing refers to.

    Args:
        states: keys, or the first digits of keys, of those that something refers to.
    """
    known = _prefixes(states)
    files = [path for path in sorted(_locks().glob("*-*.lock")) if path.stem.rpartition("-")[2] not in known]
    if files := [path for path in files if _is_free(path)]:
        yield Garbage(
            what="lock files",
            name=".gradtrail/locks",
            why=f"{len(files)} of states that nothing refers to",
            size_bytes=0,
            remove=functools.partial(_remove_locks, files),
        )


def _why(folder: Path, complete: set[str]) -> str:
    """Say why a folder of checkpoints may go; nothing where it may not."""
    if _state_of(folder) in complete:
        return "its training is complete"
    last = max((path.stat().st_mtime for path in [folder, *folder.iterdir()]), default=0.0)
    days = (time.time() - last) / 86_400
    return f"stopped {days:.0f} days ago" if days > KEPT_DAYS else ""


def _checkpoint_folders() -> list[Path]:
    return sorted(path for path in (private_folder() / "resume").glob("*-*") if path.is_dir())


def _state_of(folder: Path) -> str:
    return folder.name.partition("-")[0]


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
    """Remove a file or folder while holding a lock; leave it where a process took the lock meanwhile."""
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
