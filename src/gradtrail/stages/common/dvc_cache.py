"""Reading files from DVC's cache by their digests, without importing DVC, which takes longer than most queries.

Out of scope: writing to the cache, and remotes; `dvc fetch` and `dvc pull` do that.
"""

import configparser
import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from platformdirs import site_config_dir, user_config_dir

from gradtrail.stages.common.files import digest, folder_digest, scratch_folder, stamps_of
from gradtrail.stages.common.pipeline_file import output_digests, read_locks
from gradtrail.support.errors import UserError
from gradtrail.support.git import blobs, require_full_clone
from gradtrail.support.paths import root, working_folder


def cache_folder() -> Path:
    """Return the folder of DVC's cache, which the last of DVC's configuration files that names one decides."""
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


def cached_path(md5: str) -> Path:
    """Return the place in the cache of a file, or of a folder's listing."""
    return file_folder() / md5[:2] / md5[2:]


def listing(md5: str) -> Mapping[str, str] | None:
    """Return the digest of each file in a folder with this digest, by its path there; None if the cache lacks it."""
    try:
        return {entry["relpath"]: entry["md5"] for entry in json.loads(cached_path(md5).read_bytes())}
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
    return cached_files(md5) is not None or _is_in_working_folder(out, md5)


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
    folder = working_folder()
    try:
        yield
    except BaseException:
        # Without a lock, or without space on the disk, the error of the block is reported
        with contextlib.suppress(UserError, OSError), scratch_folder(folder, f"{stage}-restored") as scratch:
            for out, md5 in output_digests(read_locks(folder).get(stage, {})).items():
                if not (folder / out).exists() and restore(out, md5, scratch, ""):
                    (folder / out).parent.mkdir(parents=True, exist_ok=True)
                    (scratch / out).rename(folder / out)
        raise


def _from_cache(md5: str, target: Path) -> bool:
    files = cached_files(md5)
    if md5.endswith(".dir"):
        target.mkdir(exist_ok=True)
    for name, source in (files or {}).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name)  # without its mode: the cache is read-only
    return files is not None


def cached_files(md5: str) -> Mapping[str, Path] | None:
    """Return the places in the cache of an output's files, by their paths in it; None if the cache lacks one."""
    digests = listing(md5) if md5.endswith(".dir") else {"": md5}
    places = {name: cached_path(file_md5) for name, file_md5 in (digests or {}).items()}
    return None if digests is None or not all(place.is_file() for place in places.values()) else places


def _from_commit(commit: str, out: str, target: Path) -> bool:
    contents = blobs(commit, [out])
    for content in contents.values():
        target.write_bytes(content)
    return bool(contents)


def _from_working_folder(out: str, md5: str, target: Path) -> bool:
    if is_there := _is_in_working_folder(out, md5):
        source = working_folder() / out
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    return is_there


def _is_in_working_folder(out: str, md5: str) -> bool:
    path = working_folder() / out
    return path.exists() and _digest_of(path, tuple(sorted(stamps_of([path]).items()))) == md5


@functools.lru_cache(maxsize=256)  # states without files ask for the same outputs, of many megabytes, again and again
def _digest_of(path: Path, stamps: tuple[Any, ...]) -> str:  # noqa: ARG001  # the stamps are part of the key
    return digest(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
