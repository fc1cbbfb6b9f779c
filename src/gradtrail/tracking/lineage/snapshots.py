"""Finds `dvc.yaml` files with their locks: in the working folder, in git's history, and in DVC's experiments.

Parsing YAML is slow, so parsed contents are cached in `.gradtrail/parsed`, by the ids of the contents. Out of scope:
DVC's run-cache, which `recorded.py` reads.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import parse_yaml, read_yaml
from gradtrail.stages.common.pipeline_file import FILES, StageSpec, parse_lock, parse_pipeline
from gradtrail.support.errors import UserError
from gradtrail.support.git import GitError, blob_ids, git, git_bytes
from gradtrail.support.paths import private_folder, working_folder

_EXPERIMENT = re.compile(r"refs/exps/([0-9a-f]{2})/([0-9a-f]{38,62})/(.+)")  # others there are DVC's own
_FORM = "1"  # version of the files in `.gradtrail/parsed`


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of DVC's experiments."""

    name: str
    baseline: str  # commit that it started from
    commit: str

    @property
    def tags(self) -> dict[str, str]:
        """The name and the baseline, as tags of a run."""
        return {"dvc.exp_name": self.name, "dvc.exp_baseline": self.baseline}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A `dvc.yaml` and a `dvc.lock` that belong together, with those of the optional pipelines if there are any."""

    pipeline: dict[str, StageSpec]
    lock: dict[str, Any]  # stage → its section
    commit: str = ""  # first commit that has both files
    experiment: Experiment | None = None

    @property
    def tags(self) -> dict[str, str]:
        """The commit and the experiment, as tags of a run that is rebuilt from the snapshot."""
        tags = {"mlflow.source.git.commit": self.commit} if self.commit else {}
        return tags | (self.experiment.tags if self.experiment else {})


def find_experiments() -> list[Experiment]:
    """Return DVC's experiments, the oldest first."""
    lines = git("for-each-ref", "--sort=committerdate", "--format=%(objectname) %(refname)", "refs/exps").splitlines()
    pairs = (line.split(" ", 1) for line in lines)
    matches = ((commit, match) for commit, ref in pairs if (match := _EXPERIMENT.fullmatch(ref)))
    return [Experiment(name=match[3], baseline=match[1] + match[2], commit=commit) for commit, match in matches]


def working_snapshot() -> Snapshot | None:
    """Return the snapshot of the working folder; None if it has no lock.

    Raises:
        UserError: One of the files is not a `dvc.yaml` or `dvc.lock`.
    """
    folder = working_folder()
    if not (folder / "dvc.lock").is_file():
        return None
    files = [folder / name for name in FILES]

    def parse() -> dict[str, Any]:
        return _parse({name: read_yaml(path) for name, path in zip(FILES, files, strict=True) if path.is_file()})

    return _parsed([_blob_id(path) for path in files], parse)


def snapshot_of(commit: str) -> Snapshot | None:
    """Return the snapshot of a commit; None if it lacks one of the files, or they cannot be read."""
    ids = [blob_ids([commit], name)[0] for name in FILES]
    return _commit_snapshot(commit, ids) if all(ids[:2]) else None


def committed_snapshots() -> tuple[list[Snapshot], int]:
    """Return the distinct snapshots of commits and experiments, oldest first, and the number that cannot be read."""
    history = git("rev-list", "--reverse", "--full-history", "--exclude=refs/exps/*", "--all", "--", *FILES[1::2])
    experiments = {one.commit: one for one in find_experiments()}
    commits = list(dict.fromkeys([*history.splitlines(), *experiments]))
    snapshots: dict[tuple[str, ...], Snapshot | None] = {}
    for commit, *parts in zip(commits, *(blob_ids(commits, name) for name in FILES), strict=True):
        ids = tuple(parts)
        if not all(ids[:2]):
            continue
        if ids not in snapshots:
            snapshots[ids] = _commit_snapshot(commit, ids)
        if (one := snapshots[ids]) and not one.experiment:
            snapshots[ids] = dataclasses.replace(one, experiment=experiments.get(commit))
    readable = [one for one in snapshots.values() if one]
    return readable, len(snapshots) - len(readable)


def disk_cached(key: str, make: Callable[[], Any]) -> Any:
    """Return the result of `make` for a content with this key, from the cache on disk if it is there."""
    path = private_folder() / "parsed" / f"{key}-{_FORM}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    made = make()
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(made))
    return made


def _commit_snapshot(commit: str, ids: Sequence[str]) -> Snapshot | None:
    """Return the snapshot of a commit whose `FILES` have these ids; the id of a missing file is empty."""

    def parse() -> dict[str, Any]:
        blobs = {name: blob for name, blob in zip(FILES, ids, strict=True) if blob}
        return _parse({name: parse_yaml(git_bytes("cat-file", "blob", blob), name) for name, blob in blobs.items()})

    try:
        return dataclasses.replace(_parsed(ids, parse), commit=commit)
    except GitError:
        raise
    except UserError:  # from another project, or with merge conflicts
        return None


def _parsed(ids: Iterable[str], parse: Callable[[], dict[str, Any]]) -> Snapshot:
    """Return the snapshot of contents with these ids."""
    content = disk_cached("-".join(filter(None, ids)), parse)
    specs = {name: _spec(**spec) for name, spec in content["pipeline"].items()}
    return Snapshot(pipeline=specs, lock=content["lock"])


def _parse(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stages and the sections of the lock, from the contents of the `FILES` that exist."""
    pipelines, locks = ([name for name in names if name in contents] for names in (FILES[::2], FILES[1::2]))
    specs = {stage: spec for name in pipelines for stage, spec in parse_pipeline(contents[name], name).items()}
    sections = {stage: section for name in locks for stage, section in parse_lock(contents[name], name).items()}
    return {"pipeline": {stage: dataclasses.asdict(spec) for stage, spec in specs.items()}, "lock": sections}


def _spec(*, cmd: str, deps: list[str], params: Mapping[str, list[str]], outs: list[str]) -> StageSpec:
    keys = {name: tuple(names) for name, names in params.items()}
    return StageSpec(cmd=cmd, deps=tuple(deps), params=keys, outs=tuple(outs))


def _blob_id(path: Path) -> str:
    """Return git's id of the content of a file; empty if there is no file."""
    if not path.is_file():
        return ""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
