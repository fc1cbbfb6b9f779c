"""Content digests equal to those that DVC writes into `dvc.lock`, so that runs in MLflow match states in DVC."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path


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
