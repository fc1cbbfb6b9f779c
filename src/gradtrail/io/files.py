"""Writing files so that a reader sees the old bytes or the new ones, never a mixture."""

import contextlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to; rename it over `path` on success, remove it on any fault."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def writing_outs(outs: tuple[str, ...], folder: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder to write `outs` into; on success each is renamed to its place under `folder`.

    Nothing under `folder` changes before every out is complete; on any fault the outs of before stand.

    Args:
        outs: paths relative to `folder`, files or folders; all of them must be written, and nothing else.
        folder: the working folder.
        name: whose outs these are; a folder left by a killed process of the same name is removed.

    Raises:
        RuntimeError: an out was not written, or a file was written that is no out.
    """
    new = folder / ".outs" / name
    shutil.rmtree(new, ignore_errors=True)
    for out in outs:
        (new / out).parent.mkdir(parents=True, exist_ok=True)
    try:
        yield new
        _check_outs(new, outs)
        for out in outs:
            _replace(new / out, folder / out)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` with sorted keys: equal content gives equal bytes."""
    with atomic_file(path) as beside:
        beside.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


def _check_outs(new: Path, outs: tuple[str, ...]) -> None:
    written = {path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()}
    missing = [out for out in outs if not (new / out).exists()]
    surplus = [path for path in sorted(written) if not any(path == out or path.startswith(f"{out}/") for out in outs)]
    if missing or surplus:
        raise RuntimeError(f"outs not written: {missing}; written but no outs: {surplus}")


def _replace(new: Path, old: Path) -> None:
    old.parent.mkdir(parents=True, exist_ok=True)
    if old.is_dir() and not old.is_symlink():
        aside = new.with_name(f"{new.name}.old")
        old.replace(aside)
    new.replace(old)
