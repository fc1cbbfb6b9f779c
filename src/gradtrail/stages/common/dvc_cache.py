"""Reading files from DVC's cache by their digests, without importing DVC, which takes longer than most queries.

Out of scope: writing to the cache, and remotes; `dvc fetch` and `dvc pull` do that.
"""

import configparser
import contextlib
import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from platformdirs import site_config_dir, user_config_dir

from gradtrail.stages.common.digests import digest, folder_digest, stamps_of
from gradtrail.stages.common.files import scratch_folder
from gradtrail.stages.common.pipeline_file import output_digests, read_locks
from gradtrail.support.errors import UserError
from gradtrail.support.git import blobs, require_full_clone
from gradtrail.support.paths import root, working_folder

_CLOCK_SECONDS = 2  # within which two writes may have one time, on any file system


def cache_folder() -> Path:
    """Return the folder of DVC's cache, as the last of DVC's configuration files that names it says."""
    return _configured_cache(root() / ".dvc")


def require_copies() -> None:
    """Refuse a repository in which DVC's queue and `dvc exp run --temp`, which copy the repository, would fail."""
    require_full_clone(root())
    if not str(folder := cache_folder()).isascii():
        raise UserError(
            f"{folder}: DVC's queue and `dvc exp run --temp` fail if the path of its cache is not ASCII; "
            "`dvc cache dir --local PATH` sets another, or move the repository"
        )


def has_remote() -> bool:
    """Whether DVC's configuration names a remote to pull from."""
    configs = _configurations(root() / ".dvc")
    return any(name.strip("'").startswith("remote ") for _, config in configs for name in config.sections())


def _configurations(dvc_folder: Path) -> Iterator[tuple[Path, configparser.ConfigParser]]:
    """Yield DVC's configuration files; later ones override earlier ones."""
    system = os.environ.get("DVC_SYSTEM_CONFIG_DIR") or site_config_dir("dvc", "iterative")
    user = os.environ.get("DVC_GLOBAL_CONFIG_DIR") or user_config_dir("dvc", "iterative")
    for file in (Path(system, "config"), Path(user, "config"), dvc_folder / "config", dvc_folder / "config.local"):
        config = configparser.ConfigParser(interpolation=None, strict=False)
        with contextlib.suppress(configparser.Error, ValueError):  # DVC itself reports it
            config.read(file, encoding="utf-8")
            yield file, config


@functools.cache
def _configured_cache(dvc_folder: Path) -> Path:
    cache = dvc_folder / "cache"
    for file, config in _configurations(dvc_folder):
        if folder := config.get("cache", "dir", fallback="").strip("\"' "):
            cache = file.parent / folder
    return cache


def file_folder() -> Path:
    """Return the folder of the cached files, which has a folder for each two leading digits of a digest."""
    return cache_folder() / "files" / "md5"


def listing(md5: str) -> Mapping[str, str] | None:
    """Return the digest of each file in a folder with this digest, by its path there; None if the cache lacks it."""
    try:
        return {entry["relpath"]: entry["md5"] for entry in json.loads(_place(md5).read_bytes())}
    except (OSError, ValueError):  # missing, or cut off
        return None


def digest_within(out: str, md5: str, dep: str) -> str | None:
    """Return the digest of a dep, a file or folder, that is an output or lies in it; None if the cache lacks it."""
    if dep == out:
        return md5
    files, place = listing(md5) or {}, dep.removeprefix(f"{out}/")
    below = {
        name.removeprefix(f"{place}/"): file_md5 for name, file_md5 in files.items() if name.startswith(f"{place}/")
    }
    return folder_digest(below) if below else files.get(place)


def is_here(out: str, md5: str) -> bool:
    """Whether the cache, or the current working folder, has an output with this digest."""
    files = _files_of(md5)
    in_cache = files is not None and all(_place(file_md5).is_file() for file_md5 in files.values())
    return in_cache or _is_in_working_folder(out, md5)


def restore(out: str, md5: str, to: Path, commit: str) -> bool:
    """Copy an output with this digest into the folder `to`; return whether the cache, a commit or the folder has it."""
    target = to / out
    target.parent.mkdir(parents=True, exist_ok=True)
    sources: tuple[Callable[[], bool], ...] = (
        lambda: _from_cache(md5, target),
        lambda: commit != "" and _from_commit(commit, out, target),
        lambda: _from_working_folder(out, md5, target),
    )
    for source in sources:
        _remove(target)
        if source() and digest(target) == md5:
            return True
    return False


@contextlib.contextmanager
def restoring_outs(stage: str) -> Iterator[None]:
    """Restore the missing outputs of a stage, as `dvc.lock` names them, if the block ends with an exception.

    DVC removes the outputs before it runs the command. Outputs that the cache lacks stay missing.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(UserError, OSError):  # no lock, or no space: the error of the block is reported
            _restore_missing(output_digests(read_locks(working_folder()).get(stage, {})), f"{stage}-restored")
        raise


def _restore_missing(outs: Mapping[str, str], name: str) -> None:
    folder = working_folder()
    with scratch_folder(folder, name) as place:
        for out, md5 in outs.items():
            if not (folder / out).exists() and restore(out, md5, place, ""):
                (folder / out).parent.mkdir(parents=True, exist_ok=True)
                (place / out).rename(folder / out)


def _from_cache(md5: str, target: Path) -> bool:
    if (files := _files_of(md5)) is None:
        return False
    if md5.endswith(".dir"):
        target.mkdir(exist_ok=True)
    for name, file_md5 in files.items():
        path, source = target / name, _place(file_md5)
        if not source.is_file():
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)  # without its mode: the cache is read-only
    return True


def _files_of(md5: str) -> Mapping[str, str] | None:
    """Return the digests of an output's files, by their paths in it; None if the cache lacks a folder's listing."""
    if md5.endswith(".dir"):
        return listing(md5)
    return {"": md5}


def _from_commit(commit: str, out: str, target: Path) -> bool:
    contents = blobs(commit, [out])
    for content in contents.values():
        target.write_bytes(content)
    return bool(contents)


def _from_working_folder(out: str, md5: str, target: Path) -> bool:
    if not _is_in_working_folder(out, md5):
        return False
    source = working_folder() / out
    if source.is_dir():
        shutil.copytree(source, target, copy_function=shutil.copyfile)
    else:
        shutil.copyfile(source, target)
    return True


def _is_in_working_folder(out: str, md5: str) -> bool:
    path = working_folder() / out
    return path.exists() and _digest_of_now(path) == md5


def _digest_of_now(path: Path) -> str:
    """Return the digest of a file or folder; reads it again only if it was written since."""
    stamps = stamps_of([path])
    is_settled = all(time.time() - modified / 1e9 > _CLOCK_SECONDS for _, modified, *_ in stamps.values())
    return _digest_of(path, tuple(sorted(stamps.items()))) if is_settled else digest(path)


@functools.lru_cache(maxsize=256)  # states without files ask for the same outputs, of many megabytes, again and again
def _digest_of(path: Path, stamp: tuple[Any, ...]) -> str:  # noqa: ARG001
    return digest(path)


def _place(md5: str) -> Path:
    return file_folder() / md5[:2] / md5[2:]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
