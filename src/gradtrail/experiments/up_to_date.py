"""Whether `dvc repro` has nothing to do, without starting DVC, which takes longer than everything else in that case.

The pipeline is up to date if the stamps of its files are the same as before and after a `dvc repro` that succeeded and
changed none of them. Stamps are stricter than DVC's: they cover every file of the repository, the cached files of the
outputs, and the time of change of each. A pipeline that depends on anything else is never found up to date.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gradtrail.stages.common.dvc_cache import file_folder, listing
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.pipeline_file import FILES, output_digests, parse_pipeline, sha256_of
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError
from gradtrail.support.paths import private_folder
from gradtrail.tracking.recorded import working_snapshot

_CONFIGS = (Path(".dvc/config"), Path(".dvc/config.local"))
# What has no stamp in the root, as it changes without a stage: what is hidden, and MLflow's files
_UNSTAMPED = re.compile(r"\.(?!dvcignore$)|mlruns(/|$)|mlflow\.db")
_PATH = re.compile(r"(?![./])[^$:]+")  # not absolute, no address, no template
_KEYS = {"cmd", "deps", "desc", "meta", "metrics", "outs", "params", "plots", "wdir"}  # of a stage; not always_changed


def pipeline_stamp() -> str:
    """Return a digest of the stamps of all files that `dvc repro` may read; empty if its files cannot be read."""
    with contextlib.suppress(UserError):
        stamps = [*map(_stamp, _CONFIGS), *_stamps_of_repository(), *_stamps_of_cache()]
        return sha256_of({"dvc": version("dvc"), "stamps": sorted(stamps)})
    return ""


def is_up_to_date(stamp: str) -> bool:
    """Whether `dvc repro` had nothing to do at this stamp."""
    return stamp != "" and _place().is_file() and _place().read_text() == stamp


def remember(stamp: str) -> None:
    """Keep the stamp that was taken before a `dvc repro` that succeeded, if that had nothing to do."""
    if stamp and stamp == pipeline_stamp() and _depends_on_repository():
        with atomic_file(_place()) as temporary:
            temporary.write_text(stamp)


def _place() -> Path:
    return private_folder() / "up_to_date.txt"


def _stamp(path: Path) -> list[str]:
    """Return the path of a file, with its inode, size and times if it exists; a link counts as what it names."""
    with contextlib.suppress(OSError):
        stat = path.stat()
        return [str(path), *map(str, (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))]
    return [str(path)]


def _stamps_of_repository() -> Iterator[list[str]]:
    for place, names_of_folders, names in os.walk("."):
        names_of_folders[:] = [name for name in names_of_folders if not _UNSTAMPED.match(str(Path(place, name)))]
        for folder in (Path(place, name) for name in names_of_folders):
            yield [str(folder)]  # an output may be an empty folder
            if folder.is_symlink():  # whose files are not seen
                yield _never_the_same()
        for file in (Path(place, name) for name in names):
            if not _UNSTAMPED.match(str(file)):
                yield _stamp(file)
            # May name files elsewhere
            if file.suffix == ".dvc" or (file.name == "dvc.yaml" and str(file) not in FILES):
                yield _never_the_same()


def _stamps_of_cache() -> Iterator[list[str]]:
    snapshot = working_snapshot()
    outs = [out for lock in (snapshot.lock.values() if snapshot else ()) for out in output_digests(lock).values()]
    for out in outs:
        for md5 in (out, *((listing(out) or {}).values() if out.endswith(".dir") else ())):
            yield _stamp(file_folder() / md5[:2] / md5[2:])


def _never_the_same() -> list[str]:
    """Return a stamp that differs at each call, for files that have none."""
    return [os.urandom(16).hex()]


def _depends_on_repository() -> bool:
    """Whether files of the repository decide which stages run: none always runs, or reads a file elsewhere."""
    with contextlib.suppress(UserError):
        return all(_reads_repository(Path(name)) for name in FILES[::2] if Path(name).is_file())
    return False


def _reads_repository(file: Path) -> bool:
    content: dict[str, Any] = read_yaml(file)
    for name, spec in parse_pipeline(content, str(file)).items():
        section = content["stages"][name]
        is_in_root = os.path.normpath(file.parent / section.get("wdir", "")) == "."
        paths = (*spec.deps, *spec.outs, *spec.params)
        if not (is_in_root and spec.deps and section.keys() <= _KEYS and all(map(_is_stamped, paths))):
            return False
    return "vars" not in content


def _is_stamped(path: object) -> bool:
    """Whether a path of `dvc.yaml` is that of a file in the repository that has a stamp."""
    return (
        isinstance(path, str)
        and _PATH.fullmatch(path) is not None
        and ".." not in path.split("/")
        and not _UNSTAMPED.match(path)
    )
