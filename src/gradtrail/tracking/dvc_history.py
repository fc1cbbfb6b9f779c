"""The states that the working folder, commits and DVC's experiments record."""

import contextlib
import dataclasses
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import or_
from pathlib import Path
from typing import Any

from gradtrail.stages.common.files import atomic_file, digest
from gradtrail.stages.common.pipeline_file import (
    FILES,
    TRAIN,
    Entry,
    StageSpec,
    is_code,
    live_entry,
    parse_lock,
    parse_pipeline,
)
from gradtrail.stages.common.yaml_file import parse_yaml
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.git import CommandError, blob_ids, git, git_bytes, unpack
from gradtrail.support.paths import private_folder, working_folder
from gradtrail.tracking.state import Experiment, RecordedState, Snapshot
from gradtrail.tracking.tags import BASELINE, COMMIT, DIRTY, EXPERIMENT_NAME

_EXPERIMENT = re.compile(r"(\w+) refs/exps/([0-9a-f]{2})/([0-9a-f]{38,62})/(.+)")  # others there are DVC's own


@dataclass(frozen=True, kw_only=True)
class RecordedStates:
    """The states that commits, experiments and the working folder record."""

    snapshots: list[Snapshot]  # distinct ones of commits and experiments, oldest first; the working folder's last
    num_unreadable: int  # commits whose `dvc.yaml` or `dvc.lock` cannot be read


def find_experiments() -> list[Experiment]:
    """Return DVC's experiments, the oldest first."""
    lines = git("for-each-ref", "--sort=committerdate", "--format=%(objectname) %(refname)", "refs/exps").splitlines()
    matches = filter(None, map(_EXPERIMENT.fullmatch, lines))
    return [Experiment(name=match[4], baseline=match[2] + match[3], commit=match[1]) for match in matches]


def working_snapshot() -> Snapshot | None:
    """Return the snapshot of the working folder; None if it has no lock."""
    folder = working_folder()
    if not (folder / "dvc.lock").is_file():
        return None
    keys = {name: digest(folder / name) for name in FILES if (folder / name).is_file()}
    return _snapshot(keys, lambda name: (folder / name).read_bytes())


def snapshot_of(commit: str) -> Snapshot | None:
    """Return the snapshot of a commit; None if it lacks one of the files, or they cannot be read."""
    ids = [blob_ids([commit], name)[0] for name in FILES]
    return _commit_snapshot(commit, ids) if all(ids[:2]) else None


def recorded_states() -> RecordedStates:
    """Read what commits, experiments and the working folder record."""
    history = git("rev-list", "--reverse", "--full-history", "--exclude=refs/exps/*", "--all", "--", *FILES[1::2])
    experiments = {one.commit: one for one in find_experiments()}
    commits = list(dict.fromkeys([*history.splitlines(), *experiments]))
    snapshots: dict[tuple[str, ...], Snapshot | None] = {}
    for commit, *parts in zip(commits, *(blob_ids(commits, name) for name in FILES), strict=True):
        ids = tuple(parts)
        if all(ids[:2]) and ids not in snapshots:
            snapshots[ids] = _commit_snapshot(commit, ids)
        if (one := snapshots.get(ids)) and not one.experiment:
            snapshots[ids] = dataclasses.replace(one, experiment=experiments.get(commit))
    readable = [one for one in snapshots.values() if one]
    working = working_snapshot()
    num_unreadable = len(snapshots) - len(readable)
    return RecordedStates(snapshots=[*readable, *([working] if working else [])], num_unreadable=num_unreadable)


def consistent_stages(snapshot: Snapshot) -> Iterator[RecordedState]:
    """Yield the stages of a snapshot, in its order, whose sections fit those of the stages before them."""
    stages = (RecordedState(name, snapshot=snapshot) for name in snapshot.pipeline)
    sound = [stage for stage in stages if stage.is_sound]
    has_training = any(stage.name == TRAIN for stage in sound)
    yield from (stage for stage in sound if has_training or not stage.is_below_training)


def recorded_origin(stage: RecordedState) -> dict[str, str]:
    """Return tags of a recorded state: experiment, commit, and whether the state has other code or params than that."""
    experiment, tags = stage.snapshot.experiment, dict[str, str]()
    if experiment:
        tags = {EXPERIMENT_NAME: experiment.name, BASELINE: experiment.baseline}
    if stage.commit:
        entry = stage.entry(stage.name)
        code = {dep: md5 for dep, md5 in entry.deps.items() if is_code(dep)}
        is_dirty = str(difference(stage.commit, dataclasses.replace(entry, deps=code)) != "").lower()
        tags |= {COMMIT: stage.commit, DIRTY: is_dirty}
    return tags


def difference(commit: str, entry: Entry, untracked: Iterable[str] = ()) -> str:
    """Return what of an entry's deps and params a commit, with untracked files, has otherwise; empty if nothing."""
    params = {file: tuple(values) for file, values in entry.params.items()}
    spec = StageSpec(cmd=entry.cmd, deps=tuple(entry.deps), params=params, outs=())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            unpack(commit, folder, *entry.deps, *params)
            for file in untracked:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / file)
            live = live_entry(spec, folder)
        except (UserError, OSError) as error:  # the commit lacks a file, or it is no params file
            return one_line(error)
    pairs = [*live.deps.items(), *live.params.items()]
    return ", ".join(name for name, value in pairs if value != {**entry.deps, **entry.params}[name])


def _commit_snapshot(commit: str, ids: Sequence[str]) -> Snapshot | None:
    """Return the snapshot of a commit whose `FILES` have these ids; the id of a missing file is empty."""
    blobs = {name: blob for name, blob in zip(FILES, ids, strict=True) if blob}
    try:
        return _snapshot(blobs, lambda name: git_bytes("cat-file", "blob", blobs[name]), commit)
    except CommandError:
        raise
    except UserError:  # from another project, or with merge conflicts
        return None


def _snapshot(keys: Mapping[str, str], read: Callable[[str], bytes], commit: str = "") -> Snapshot:
    """Return the snapshot of the `FILES` that exist: name → key of the content, which `read` returns by the name."""
    contents = {name: parsed(name, key, functools.partial(read, name)) for name, key in keys.items()}
    pipelines = (parse_pipeline(contents[name], name) for name in FILES[::2] if name in contents)
    locks = (parse_lock(contents[name], name) for name in FILES[1::2] if name in contents)
    return Snapshot(pipeline=functools.reduce(or_, pipelines), lock=functools.reduce(or_, locks), commit=commit)


def parsed(name: str, key: str, read: Callable[[], bytes]) -> Any:
    """Return the content of a YAML file, by a key of its bytes; parsing is slow, so the disk keeps the result."""
    path = private_folder() / "parsed" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    content = parse_yaml(read(), name)
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content))
    return content
