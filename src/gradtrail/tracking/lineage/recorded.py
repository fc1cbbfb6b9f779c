"""Lists the states that commits, experiments and the working folder record, and those of DVC's run-cache.

`gradtrail sync` backfills their runs; `gradtrail gc` removes the runs of all other states.

DVC's run-cache has an entry for every stage that ran: the stage's section of `dvc.lock`, without its name and without
the stages before it. The name follows from the command; the stages before it are looked up by the digests of what it
read, among the entries or else in the locks. If several entries wrote the same bytes, the newest is used; so an entry
counts only if no lock records its state.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gradtrail.stages.common.dvc_cache import cache_folder, digest_within, is_here
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import (
    TRAIN,
    StageSpec,
    contains_path,
    has_shape,
    locked_entry,
    output_digests,
    sha256_of,
    stages_below_training,
    upstream_stages,
)
from gradtrail.support.errors import UserError
from gradtrail.support.git import blobs
from gradtrail.tracking.lineage.keys import state_key
from gradtrail.tracking.lineage.snapshots import Snapshot, committed_snapshots, disk_cached, working_snapshot
from gradtrail.tracking.lineage.state import Identity

Section = dict[str, Any]
Pipeline = Mapping[str, StageSpec]
_T = TypeVar("_T")


def entry_files() -> list[Path]:
    """Return the files of the run-cache, the oldest first."""
    files = [path for path in (cache_folder() / "runs").glob("??/*/*") if len(path.name) == 64]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def read_run_cache() -> dict[Path, Section]:
    """Return the readable entries of the run-cache by their files, the oldest first."""
    return {path: section for path in entry_files() if (section := _read(path))}


def run_cache_snapshots(recorded: Sequence[Snapshot], is_known: Callable[[str], bool]) -> list[Snapshot]:
    """Return a snapshot for each entry whose lineage the run-cache or a lock has, oldest first.

    Args:
        recorded: Snapshots, oldest first: pipelines that an entry may belong to, and locks that may have the stages
            before it. If an entry fits several pipelines, the newest is used.
        is_known: True if a state, given by its key, needs no snapshot.
    """
    if not (sections := list(read_run_cache().values())):
        return []
    newest_first = {sha256_of(one): one for snapshot in reversed(recorded) for one in snapshot.lock.values()}
    locked = [*newest_first.values()][::-1]
    snapshots: dict[str, Snapshot] = {}
    for pipeline in _unique(snapshot.pipeline for snapshot in reversed(recorded)):
        fitting = [(name, section) for section in sections if (name := _stage_of(section, pipeline))]
        keys = [state_key(name, locked_entry(section)) for name, section in fitting]
        if all(key in snapshots or is_known(key) for key in keys):
            continue
        candidates = [(name, section) for section in locked if (name := _stage_of(section, pipeline))] + fitting
        for key, (name, section) in zip(keys, fitting, strict=True):
            if not (key in snapshots or is_known(key)) and (lock := _lineage(name, section, candidates, pipeline)):
                snapshots[key] = Snapshot(pipeline=dict(pipeline), lock=lock)
    return list(snapshots.values())


def _unique(values: Iterable[_T]) -> list[_T]:
    """Return the distinct values in their order; they need not be hashable."""
    unique: list[_T] = []
    for value in values:
        if value not in unique:
            unique.append(value)
    return unique


def _read(path: Path) -> Section | None:
    try:
        section = disk_cached(path.name, lambda: read_yaml(path))
        return section if locked_entry(section) and output_digests(section) else None
    except (UserError, KeyError, TypeError):  # not an entry; DVC removes what it cannot read
        return None


def _stage_of(section: Section, pipeline: Pipeline) -> str | None:
    """Return the stage that wrote an entry."""
    fitting = (name for name, spec in pipeline.items() if spec.cmd == section["cmd"] and has_shape(section, spec))
    return next(fitting, None)


def _lineage(
    name: str, section: Section, candidates: list[tuple[str, Section]], pipeline: Pipeline
) -> dict[str, Section]:
    """Return a lock of a stage and all before it, from the last to the first; empty if one is missing."""
    lock = {name: section}
    for stage in reversed(list(pipeline)):
        if stage in lock or not any(stage in upstream_stages(user, pipeline) for user in lock):
            continue
        digests = {dep: read for one in lock.values() for dep, read in locked_entry(one).data.items()}
        fitting = (one for made, one in reversed(candidates) if made == stage and _fits(one, digests))
        if (newest := next(fitting, None)) is None:
            return {}
        lock[stage] = newest
    if TRAIN not in lock and name in stages_below_training(pipeline):  # it reads no output of its training
        if not (trainings := [one for made, one in candidates if made == TRAIN and _is_of_training(section, one)]):
            return {}
        lock[TRAIN] = trainings[-1]
    return {stage: lock[stage] for stage in pipeline if stage in lock}


def _is_of_training(section: Section, training: Section) -> bool:
    """Whether a training has the same params and data as an entry, as far as both have them."""
    params, of_training = (locked_entry(one).params.get("params.yaml", {}) for one in (section, training))
    return params.get("train") == of_training.get("train") and _reads_alike(training, locked_entry(section).data)


def _fits(section: Section, digests: Mapping[str, str]) -> bool:
    """Whether an entry wrote the files that are in its outputs with these digests, and read no other version of any."""
    return _reads_alike(section, digests) and all(
        digest_within(out, md5, dep) == expected
        for dep, expected in digests.items()
        for out, md5 in output_digests(section).items()
        if contains_path(out, dep)
    )


def _reads_alike(section: Section, digests: Mapping[str, str]) -> bool:
    return all(digests.get(dep, md5) == md5 for dep, md5 in locked_entry(section).data.items())


@dataclass(frozen=True, kw_only=True)
class RecordedStates:
    """The states that commits, experiments and the working folder record."""

    snapshots: list[Snapshot]  # oldest first, the working folder's last
    num_unreadable: int  # commits whose `dvc.yaml` or `dvc.lock` cannot be read

    def only_in_run_cache(self, is_known: Callable[[str], bool]) -> list[Snapshot]:
        """Return the snapshots that only the run-cache has, oldest first, if DVC's cache has their files.

        Args:
            is_known: True if a state, given by its key, needs no snapshot.
        """
        snapshots = run_cache_snapshots(self.snapshots, is_known)
        return [snapshot for snapshot in snapshots if has_files(last_stage(snapshot))]


def recorded_states() -> RecordedStates:
    """Read what commits, experiments and the working folder record.

    Raises:
        UserError: The `dvc.yaml` or `dvc.lock` of the working folder cannot be read.
    """
    committed, num_unreadable = committed_snapshots()
    working = working_snapshot()
    return RecordedStates(snapshots=[*committed, *([working] if working else [])], num_unreadable=num_unreadable)


def consistent_stages(snapshot: Snapshot) -> Iterator[Identity]:
    """Yield the stages of a snapshot, in its order, whose sections fit those of the stages before them."""
    stages = (Identity(name, from_lock=True, snapshot=snapshot) for name in snapshot.pipeline)
    sound = [stage for stage in stages if stage.is_sound]
    has_training = any(stage.name == TRAIN for stage in sound)
    yield from (stage for stage in sound if has_training or not stage.is_below_training)


def last_stage(snapshot: Snapshot) -> Identity:
    """Return the last stage in the lock of a snapshot: for one from the run-cache, the stage of the entry."""
    return Identity(list(snapshot.lock)[-1], from_lock=True, snapshot=snapshot)


def has_files(stage: Identity, *, commit: str = "") -> bool:
    """Whether DVC's cache, the working folder or, if given, a commit has all outputs of a stage."""
    missing = {out: md5 for out, md5 in stage.out_digests().items() if not is_here(out, md5)}
    committed = blobs(commit, missing) if missing and commit else {}
    return missing == {
        out: hashlib.md5(content, usedforsecurity=False).hexdigest() for out, content in committed.items()
    }
