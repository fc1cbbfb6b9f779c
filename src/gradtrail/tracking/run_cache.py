"""The states that only DVC's run-cache records.

The run-cache has an entry for every stage that ran: the stage's section of `dvc.lock`, without its name and without
the stages before it. The name follows from the command; the stages before it are looked up by the digests of what it
read. An entry of another pipeline than the newest is ignored.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradtrail.stages.common.dvc_cache import cache_folder, digest_within, is_here
from gradtrail.stages.common.params import PARAMS
from gradtrail.stages.common.pipeline_file import (
    TRAIN,
    StageSpec,
    contains_path,
    has_shape,
    is_below_training,
    locked_entry,
    output_digests,
    stages_before,
)
from gradtrail.support.errors import UserError
from gradtrail.tracking.dvc_history import parsed
from gradtrail.tracking.state import Snapshot, state_key

Section = dict[str, Any]  # of a stage in a `dvc.lock`, or an entry of the run-cache


def entry_files() -> list[Path]:
    """Return the files of the run-cache."""
    return [path for path in (cache_folder() / "runs").glob("??/*/*") if len(path.name) == 64]


def run_cache_entries() -> list[Section]:
    """Return the readable entries of the run-cache, the oldest first."""
    entries = []
    for path in sorted(entry_files(), key=lambda path: (path.stat().st_mtime_ns, path.name)):
        with contextlib.suppress(UserError, KeyError, TypeError):  # not an entry; DVC removes what it cannot read
            section = parsed(path.name, path.name, path.read_bytes)
            entries += [section] if locked_entry(section) and output_digests(section) else []
    return entries


def only_in_run_cache(snapshots: Sequence[Snapshot], is_known: Callable[[str], bool]) -> list[Snapshot]:
    """Return a snapshot for each state that only the run-cache has, oldest first, if DVC's cache has its files.

    The last stage of a snapshot is that of the entry; the stages before it may be in other entries or in locks. The
    states for which `is_known` is true, given the key, need no snapshot.
    """
    if not snapshots:
        return []
    pipeline, entries = snapshots[-1].pipeline, run_cache_entries()
    locked = [section for snapshot in snapshots for section in snapshot.lock.values()]
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


def _stage_of(section: Section, pipeline: Mapping[str, StageSpec]) -> str:
    """Return the stage that a section is of; empty if the pipeline has none of its form."""
    fitting = (name for name, spec in pipeline.items() if spec.cmd == section["cmd"] and has_shape(section, spec))
    return next(fitting, "")


def _lineage(
    name: str, section: Section, made: Mapping[str, Sequence[Section]], pipeline: Mapping[str, StageSpec]
) -> dict[str, Section]:
    """Return a lock with a stage, last, its training if it is below one, and all before them; empty if none fits."""
    needed = {*stages_before(name, pipeline)}
    if is_below_training(name, pipeline):
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
