"""Files of a stage: atomic writes, JSON and CSV, and the digests that DVC writes into `dvc.lock`.

Runs in MLflow match states in DVC by these digests. Stamps show without reading a file whether it was written since.
"""

import contextlib
import csv
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from gradtrail.support.errors import FULL, UserError, one_line

Stamps = dict[Path, tuple[int, ...]]
LFS_POINTER = "a Git LFS pointer, not the file itself; `git lfs pull` fetches it"
_IGNORED = {"__pycache__", ".DS_Store"}  # by `.dvcignore` too; the second one is of macOS's Finder


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Add the file name to the error of a full disk: `path`, or in a folder the file that was written last.

    An OSError of opening a file names it; one of writing does not.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            files = (file for file in path.rglob("*") if file.is_file())
            error.filename = str(max(files, key=lambda file: file.stat().st_mtime_ns, default=path))
        raise


def is_lfs_pointer(source: Path | BinaryIO) -> bool:
    """Whether Git LFS put its pointer in the place of a file that it did not fetch."""
    first = b"version https://git-lfs.github.com/"
    with source.open("rb") if isinstance(source, Path) else contextlib.nullcontext(source) as file:
        file.seek(0)
        return file.read(len(first)) == first


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` on success, remove it on any exception.

    A symlink stays, and the file that it names is replaced.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming_file(path):
            yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing_outs(outs: tuple[str, ...], folder: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder to write `outs` into; on success each is renamed to its path under `folder`.

    On any exception the previous outputs are kept. They are all moved away before the first new one is moved in, so
    that even a kill never leaves a mixture. Another process that writes the same outputs waits.

    Raises:
        RuntimeError: an output was not written, or a file was written that is not an output.
    """
    new, old = folder / ".outs" / name, folder / ".outs" / f"{name}.old"
    new.parent.mkdir(exist_ok=True)
    with FileLock(new.with_suffix(".lock")):
        _remove(new, old)
        for out in outs:
            (new / out).parent.mkdir(parents=True, exist_ok=True)
        try:
            with naming_file(new):
                yield new
            _check_outs(new, outs)
            _exchange(outs, folder, new, old)
        finally:
            _remove(new, old)


@contextlib.contextmanager
def scratch_folder(folder: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder on the same disk as the outputs under `folder`, which is removed in the end.

    A second process that asks for the name waits; the lock also shows `gradtrail gc` that the folder is in use.
    """
    path = folder / ".outs" / f"{name}.scratch"
    path.parent.mkdir(exist_ok=True)
    lock = path.with_suffix(".scratch.lock")
    with FileLock(lock):
        _remove(path)
        path.mkdir()
        try:
            with naming_file(path):
                yield path
        finally:
            _remove(path)
            lock.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with sorted keys: equal content gives equal bytes."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV; the columns are the keys of the first row. None and NaN are empty cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows(["" if value != value else value for value in row.values()] for row in rows)


def read_json(path: Path) -> Any:
    """Read a JSON file of a stage; raise UserError if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `dvc repro` makes it") from None
    except (OSError, ValueError) as error:
        reason = one_line(error)[:200]
        raise UserError(f"{path}: not readable as JSON: {reason}; `dvc checkout` restores it") from None


def _check_outs(new: Path, outs: tuple[str, ...]) -> None:
    written = {path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()}
    missing = [out for out in outs if not (new / out).exists()]
    surplus = [path for path in sorted(written) if not any(path == out or path.startswith(f"{out}/") for out in outs)]
    if missing or surplus:
        raise RuntimeError(f"outs not written: {missing}; written, but not declared as outs: {surplus}")


def _exchange(outs: tuple[str, ...], folder: Path, new: Path, old: Path) -> None:
    """Move `outs` from `folder` to `old`, then from `new` to `folder`; on an exception, undo all moves."""
    moves = [(folder / out, old / out) for out in outs if os.path.lexists(folder / out)]
    moves += [(new / out, folder / out) for out in outs]
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            target.rename(source)
        raise


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def digest(path: Path) -> str:
    """Return the MD5 of a file, or of a folder's listing with the suffix `.dir`, as DVC 3 computes them.

    MD5 identifies content; it does not protect against forgery.
    """
    if not path.is_dir():
        return _md5_of_file(path)
    files = [file for file in path.rglob("*") if file.is_file() and not _IGNORED & {*file.parts}]
    return folder_digest({file.relative_to(path).as_posix(): _md5_of_file(file) for file in files})


def folder_digest(files: Mapping[str, str]) -> str:
    """Return the digest of a folder from the digests of its files, by their paths in it."""
    listing = [{"md5": files[name], "relpath": name} for name in sorted(files)]  # as text: "a.txt" before "a/b"
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"


def _md5_of_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """Return change time, modification time, size and inode of each file, also in folders; skips missing files.

    The change time is that of a link itself; of a file with several names, which DVC's cache shares, it is 0, as each
    new name sets it.
    """
    stamps: Stamps = {}
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            with contextlib.suppress(FileNotFoundError):  # an editor's temporary file may be gone by now
                if not file.is_dir() and not _IGNORED & {*file.parts}:
                    stat, link = file.stat(), file.lstat()
                    changed = link.st_ctime_ns if link.st_nlink == 1 else 0
                    stamps[file] = (changed, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return stamps


def changed_files(before: Stamps, after: Stamps) -> list[str]:
    """Return the files whose stamps differ, or that only one of the two has."""
    return sorted(path.as_posix() for path in {*before, *after} if before.get(path) != after.get(path))
