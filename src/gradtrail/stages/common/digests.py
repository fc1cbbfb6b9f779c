"""Content digests equal to those that DVC writes into `dvc.lock`, so that runs in MLflow match states in DVC.

And stamps, which show without reading a file whether it was written since.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

Stamps = dict[Path, tuple[int, ...]]


def digest(path: Path) -> str:
    """Return the MD5 of a file, or of a folder's listing with the suffix `.dir`, as DVC 3 computes them.

    MD5 identifies content; it does not protect against forgery.
    """
    if not path.is_dir():
        return _md5_of_file(path)
    files = [file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts]  # .dvcignore
    return folder_digest({file.relative_to(path).as_posix(): _md5_of_file(file) for file in files})


def folder_digest(files: Mapping[str, str]) -> str:
    """Return the digest of a folder from the digests of its files, by their paths in it."""
    listing = [{"md5": files[name], "relpath": name} for name in sorted(files)]  # as text: "a.txt" before "a/b"
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"


def _md5_of_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """Return change time, modification time, size and inode of each file, also in folders; skips missing files."""
    stamps: Stamps = {}
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            with contextlib.suppress(FileNotFoundError):  # an editor's temporary file may be gone by now
                if not file.is_dir() and "__pycache__" not in file.parts:
                    stat = file.stat()
                    stamps[file] = (stat.st_ctime_ns, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return stamps


def changed_files(before: Stamps, after: Stamps) -> list[str]:
    """Return the files whose stamps differ, or that only one of the two has."""
    return sorted(path.as_posix() for path in {*before, *after} if before.get(path) != after.get(path))
