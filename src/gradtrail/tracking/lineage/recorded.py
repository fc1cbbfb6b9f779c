"""Lists the states that commits, experiments and the working folder record, and those of DVC's run-cache.

`gradtrail sync` backfills their runs; `gradtrail gc` removes the runs of all other states.

DVC's run-cache keeps every stage that ran. An entry is the stage's section of `dvc.lock`, without its name and without
the stages before it. The name follows from the command; the stages before it are found by the digests of what it read,
among the entries and, where none of them fits, in the locks. Where several entries wrote the same bytes the newest is
taken; so an entry counts only where no lock records its state.
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
    """Return a snapshot for each entry whose lineage the run-cache, or a lock, has, the oldest first.

    Args:
        recorded: the oldest first: pipelines that an entry may belong to, and locks that may have the stages before it.
            Where an entry fits several pipelines the newest counts.
        is_known: whether a state, given by its key, needs no snapshot.
    """
    if not (sections := list(read_run_cache().values())):
        return []
    newest_first = {sha256_of(one): one for snapshot in reversed(recorded) for one in snapshot.lock.values()}
    locked = [*newest_first.values()][::-1]
    found: dict[str, Snapshot] = {}
    for pipeline in _each_once(snapshot.pipeline for snapshot in reversed(recorded)):
        fitting = [(name, section) for section in sections if (name := _stage_of(section, pipeline))]
        keys = [state_key(name, locked_entry(section)) for name, section in fitting]
        if all(key in found or is_known(key) for key in keys):
            continue
        known = [(name, section) for section in locked if (name := _stage_of(section, pipeline))] + fitting
        for key, (name, section) in zip(keys, fitting, strict=True):
            if not (key in found or is_known(key)) and (lock := _lineage(name, section, known, pipeline)):
                found[key] = Snapshot(pipeline=dict(pipeline), lock=lock)
    return list(found.values())


def _each_once(values: Iterable[_T]) -> list[_T]:
    """Return the values, each once, in their order; they need not be hashable."""
    found: list[_T] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _read(path: Path) -> Section | None:
    try:
        section = disk_cached(path.name, lambda: read_yaml(path))
        return section if locked_entry(section) and output_digests(section) else None
    except (UserError, KeyError, TypeError):  # no entry; DVC removes what it cannot read
        return None


def _stage_of(section: Section, pipeline: Pipeline) -> str | None:
    """Return the stage that wrote an entry."""
    fitting = (name for name, spec in pipeline.items() if spec.cmd == section["cmd"] and has_shape(section, spec))
    return next(fitting, None)


def _lineage(name: str, section: Section, known: list[tuple[str, Section]], pipeline: Pipeline) -> dict[str, Section]:
    """Return a lock of a stage and all before it, found from the last to the first; empty where one is missing."""
    lock = {name: section}
    for stage in reversed(list(pipeline)):
        if stage in lock or not any(stage in upstream_stages(user, pipeline) for user in lock):
            continue
        wanted = {dep: read for one in lock.values() for dep, read in locked_entry(one).data.items()}
        fitting = (one for made, one in reversed(known) if made == stage and _fits(one, wanted))
        if (newest := next(fitting, None)) is None:
            return {}
        lock[stage] = newest
    if (
        name in stages_below_training(pipeline) and TRAIN not in lock
    ):  # it belongs to a training but reads none of its outs
        if not (trainings := [one for made, one in known if made == TRAIN and _is_of_training(section, one)]):
            return {}
        lock[TRAIN] = trainings[-1]
    return {stage: lock[stage] for stage in pipeline if stage in lock}


def _is_of_training(section: Section, training: Section) -> bool:
    """Whether a training has the params, and read the data, that an entry has in common with it."""
    params, of_training = (locked_entry(one).params.get("params.yaml", {}) for one in (section, training))
    return params.get("train") == of_training.get("train") and _reads_alike(training, locked_entry(section).data)


def _fits(section: Section, wanted: Mapping[str, str]) -> bool:
    """Whether an entry wrote the wanted files that are in its outs, and read no other version of a wanted file."""
    return _reads_alike(section, wanted) and all(
        digest_within(out, md5, dep) == found
        for dep, found in wanted.items()
        for out, md5 in output_digests(section).items()
        if contains_path(out, dep)
    )


def _reads_alike(section: Section, wanted: Mapping[str, str]) -> bool:
    return all(wanted.get(dep, md5) == md5 for dep, md5 in locked_entry(section).data.items())


@dataclass(frozen=True, kw_only=True)
class RecordedStates:
    """The states that commits, experiments and the working folder record.

    Attributes:
        snapshots: the oldest first, the working folder's last.
        num_unreadable: commits whose `dvc.yaml` or `dvc.lock` cannot be read.
    """

    snapshots: list[Snapshot]
    num_unreadable: int

    def only_in_run_cache(self, is_known: Callable[[str], bool]) -> list[Snapshot]:
        """Return what only the run-cache has, the oldest first, as far as DVC's cache has the files.

        Args:
            is_known: whether a state, given by its key, needs no snapshot.
        """
        snapshots = run_cache_snapshots(self.snapshots, is_known)
        return [snapshot for snapshot in snapshots if has_files(last_stage(snapshot))]


def recorded_states() -> RecordedStates:
    """Read what commits, experiments and the working folder record.

    Raises:
        UserError: the `dvc.yaml` or `dvc.lock` of the working folder cannot be read.
    """
    committed, num_unreadable = committed_snapshots()
    working = working_snapshot()
    return RecordedStates(snapshots=[*committed, *([working] if working else [])], num_unreadable=num_unreadable)


def consistent_stages(snapshot: Snapshot) -> Iterator[Identity]:
    """Yield the stages of a snapshot, in its order, whose sections belong together with those of the stages before."""
    stages = (Identity(name, from_lock=True, snapshot=snapshot) for name in snapshot.pipeline)
    sound = [stage for stage in stages if stage.is_sound]
    has_training = any(stage.name == TRAIN for stage in sound)
    yield from (stage for stage in sound if has_training or not stage.is_below_training)


def last_stage(snapshot: Snapshot) -> Identity:
    """Return the last stage in the lock of a snapshot: for one from the run-cache, the stage of the entry."""
    return Identity(list(snapshot.lock)[-1], from_lock=True, snapshot=snapshot)


def has_files(stage: Identity, *, commit: str = "") -> bool:
    """Whether DVC's cache, the working folder or, if given, a commit has all outs of a stage."""
    missing = {out: md5 for out, md5 in stage.out_digests().items() if not is_here(out, md5)}
    committed = blobs(commit, missing) if missing and commit else {}
    return missing == {
        out: hashlib.md5(content, usedforsecurity=False).hexdigest() for out, content in committed.items()
    }
