"""Reads the states that the working folder, commits, experiments and DVC's run-cache record.

DVC's run-cache has an entry for every stage that ran: the stage's section of `dvc.lock`, without its name and without
the stages before it. The name follows from the command; the stages before it are looked up by the digests of what it
read. An entry of another pipeline than the newest is ignored.
"""

import contextlib
import dataclasses
import functools
import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import or_
from pathlib import Path
from typing import Any

from gradtrail.stages.common.dvc_cache import cache_folder, digest_within, is_here
from gradtrail.stages.common.files import atomic_file, digest
from gradtrail.stages.common.params import PARAMS
from gradtrail.stages.common.pipeline_file import (
    FILES,
    TRAIN,
    Entry,
    StageSpec,
    contains_path,
    has_shape,
    is_code,
    live_entry,
    locked_entry,
    output_digests,
    parse_lock,
    parse_pipeline,
    stages_before,
    stages_below_training,
)
from gradtrail.stages.common.yaml_file import parse_yaml
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.git import CommandError, blob_ids, git, git_bytes, unpack
from gradtrail.support.paths import private_folder, working_folder
from gradtrail.tracking.state import Experiment, Identity, Snapshot, state_key
from gradtrail.tracking.tags import BASELINE, COMMIT, DIRTY, EXPERIMENT_NAME

Section = dict[str, Any]  # of a stage in a `dvc.lock`, or an entry of the run-cache

_EXPERIMENT = re.compile(r"(\w+) refs/exps/([0-9a-f]{2})/([0-9a-f]{38,62})/(.+)")  # others there are DVC's own


@dataclass(frozen=True, kw_only=True)
class RecordedStates:
    """The states that commits, experiments and the working folder record."""

    snapshots: list[Snapshot]  # distinct ones of commits and experiments, oldest first; the working folder's last
    num_unreadable: int  # commits whose `dvc.yaml` or `dvc.lock` cannot be read

    def only_in_run_cache(self, is_known: Callable[[str], bool]) -> list[Snapshot]:
        """Return a snapshot for each state that only the run-cache has, oldest first, if DVC's cache has its files.

        The last stage of a snapshot is that of the entry; the stages before it may be in other entries or in locks. The
        states for which `is_known` is true, given the key, need no snapshot.
        """
        if not self.snapshots:
            return []
        pipeline, entries = self.snapshots[-1].pipeline, run_cache_entries()
        locked = [section for snapshot in self.snapshots for section in snapshot.lock.values()]
        made: dict[str, list[Section]] = defaultdict(list)
        for section in (*locked, *entries):
            made[_stage_of(section, pipeline)].append(section)
        locks: dict[str, dict[str, Section]] = {}  # state → lock
        for section in entries:
            stage = _stage_of(section, pipeline)
            is_complete = stage and all(is_here(out, md5) for out, md5 in output_digests(section).items())
            if is_complete and not is_known(key := state_key(stage, locked_entry(section))) and key not in locks:
                locks[key] = _lineage(stage, section, made, pipeline)
        return [Snapshot(pipeline=pipeline, lock=lock) for lock in locks.values() if lock]


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


def entry_files() -> list[Path]:
    """Return the files of the run-cache."""
    return [path for path in (cache_folder() / "runs").glob("??/*/*") if len(path.name) == 64]


def run_cache_entries() -> list[Section]:
    """Return the readable entries of the run-cache, the oldest first."""
    entries = []
    for path in sorted(entry_files(), key=lambda path: (path.stat().st_mtime_ns, path.name)):
        with contextlib.suppress(UserError, KeyError, TypeError):  # not an entry; DVC removes what it cannot read
            section = _parsed(path.name, path.name, path.read_bytes)
            entries += [section] if locked_entry(section) and output_digests(section) else []
    return entries


def consistent_stages(snapshot: Snapshot) -> Iterator[Identity]:
    """Yield the stages of a snapshot, in its order, whose sections fit those of the stages before them."""
    stages = (Identity(name, snapshot=snapshot) for name in snapshot.pipeline)
    sound = [stage for stage in stages if stage.is_sound]
    has_training = any(stage.name == TRAIN for stage in sound)
    yield from (stage for stage in sound if has_training or not stage.is_below_training)


def recorded_origin(stage: Identity) -> dict[str, str]:
    """Return tags of a recorded state: experiment, commit, and whether the state has other code or params than that."""
    experiment = stage.snapshot.experiment if stage.snapshot else None
    tags = {EXPERIMENT_NAME: experiment.name, BASELINE: experiment.baseline} if experiment else {}
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
    contents = {name: _parsed(name, key, functools.partial(read, name)) for name, key in keys.items()}
    pipelines = (parse_pipeline(contents[name], name) for name in FILES[::2] if name in contents)
    locks = (parse_lock(contents[name], name) for name in FILES[1::2] if name in contents)
    return Snapshot(pipeline=functools.reduce(or_, pipelines), lock=functools.reduce(or_, locks), commit=commit)


def _parsed(name: str, key: str, read: Callable[[], bytes]) -> Any:
    """Return the content of a YAML file, by a key of its bytes; parsing is slow, so the disk keeps the result."""
    path = private_folder() / "parsed" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    content = parse_yaml(read(), name)
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content))
    return content


def _stage_of(section: Section, pipeline: Mapping[str, StageSpec]) -> str:
    """Return the stage that a section is of; empty if the pipeline has none of its form."""
    fitting = (name for name, spec in pipeline.items() if spec.cmd == section["cmd"] and has_shape(section, spec))
    return next(fitting, "")


def _lineage(
    name: str, section: Section, made: Mapping[str, Sequence[Section]], pipeline: Mapping[str, StageSpec]
) -> dict[str, Section]:
    """Return a lock with a stage, last, its training if it is below one, and all before them; empty if none fits."""
    needed = {*stages_before(name, pipeline)}
    if name in stages_below_training(pipeline):
        needed |= {TRAIN, *stages_before(TRAIN, pipeline)}
    lock = {name: section}
    for stage in reversed([stage for stage in pipeline if stage in needed]):
        fitting = (one for one in reversed(made[stage]) if fits(one, lock.values()))
        if (newest := next(fitting, None)) is None:
            return {}
        lock[stage] = newest
    return dict(reversed(lock.items()))


def fits(section: Section, later: Iterable[Section]) -> bool:
    """Whether a section wrote what later sections read, and read the same params and versions of data as they did."""
    entry, outs = locked_entry(section), output_digests(section)
    params = entry.params.get(str(PARAMS), {})
    for other in map(locked_entry, later):
        shared = other.params.get(str(PARAMS), {})
        if any(params.get(key, value) != value for key, value in shared.items()):
            return False
        for dep, md5 in other.data.items():
            written = (digest_within(out, digest, dep) for out, digest in outs.items() if contains_path(out, dep))
            if entry.data.get(dep, md5) != md5 or any(digest != md5 for digest in written):
                return False
    return True
