"""Whether `dvc repro` has nothing to do, without starting DVC, which takes longer than everything else in that case.

The pipeline is up to date if the stamps of its files are the same as before and after a `dvc repro` that succeeded and
changed none of them. Stamps are stricter than DVC's: they cover every file of the repository, the cached files of the
outputs, and the time of change of each. A pipeline that may depend on anything else is never found up to date.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from gradtrail.stages.common.dvc_cache import cached_path, listing
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.pipeline_file import FILES, output_digests, parse_pipeline, sha256_of
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError
from gradtrail.support.paths import private_folder
from gradtrail.tracking.dvc_history import working_snapshot

# What has no stamp in the root, as it changes without a stage: what is hidden, and MLflow's files
_UNSTAMPED = re.compile(r"\.(?!dvcignore$)|mlruns(/|$)|mlflow\.db")
_STAMPED = re.compile(rf"(?!{_UNSTAMPED.pattern})\w[\w.-]*(/\w[\w.-]*)*")  # paths of deps, outs and params files
_KEYS = {"cmd", "deps", "params", "outs", "metrics"}  # of a stage that runs only if one of its files changes


def pipeline_stamp() -> str:
    """Return a digest of the stamps of all files that `dvc repro` may read; empty if some have none."""
    with contextlib.suppress(UserError):
        configs = [_stamp(Path(".dvc", name)) for name in ("config", "config.local")]
        return sha256_of({"dvc": version("dvc"), "stamps": sorted([*configs, *_repository(), *_cache()])})
    return ""


def is_up_to_date(stamp: str) -> bool:
    """Whether `dvc repro` had nothing to do at this stamp."""
    return stamp != "" and _place().is_file() and _place().read_text() == stamp


def remember(stamp: str) -> None:
    """Keep the stamp that was taken before a `dvc repro` that succeeded, if that had nothing to do."""
    files = [Path(name) for name in FILES[::2] if Path(name).is_file()]
    if stamp and stamp == pipeline_stamp() and all(map(_has_only_stamped_files, files)):
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


def _repository() -> Iterator[list[str]]:
    for place, folders, names in os.walk("."):
        folders[:] = [name for name in folders if not _UNSTAMPED.match(str(Path(place, name)))]
        paths = [path for name in (*folders, *names) if not _UNSTAMPED.match(str(path := Path(place, name)))]
        for path in paths:
            is_folder = path.name in folders
            # They may name files elsewhere
            is_open = path.is_symlink() if is_folder else path.suffix == ".dvc" or path.name == "dvc.yaml"
            if is_open and str(path) not in FILES:
                raise UserError(f"{path}: may have files without a stamp")
            yield [str(path)] if is_folder else _stamp(path)  # an output may be an empty folder


def _cache() -> Iterator[list[str]]:
    snapshot = working_snapshot()
    for out in (out for lock in (snapshot.lock.values() if snapshot else ()) for out in output_digests(lock).values()):
        for md5 in (out, *((listing(out) or {}).values() if out.endswith(".dir") else ())):
            yield _stamp(cached_path(md5))


def _has_only_stamped_files(file: Path) -> bool:
    """Whether the stages of a `dvc.yaml` have the plain form in which files with a stamp decide which of them run."""
    content = read_yaml(file)
    stages, sections = parse_pipeline(content, str(file)).values(), content["stages"].values()
    paths = [path for stage in stages for path in (*stage.deps, *stage.outs, *stage.params)]
    folders = {os.path.normpath(file.parent / section.get("wdir", "")) for section in sections}
    is_plain = content.keys() <= {"stages", "plots"} and all({*section} <= {*_KEYS, "wdir"} for section in sections)
    is_stamped = all(_STAMPED.fullmatch(str(path)) for path in paths) and all(stage.deps for stage in stages)
    return is_plain and folders == {"."} and is_stamped
