"""The state that a stage makes or made: its key, the states before it, and its lock.

A state is the stage, its command, the params that it reads, and the digests of its deps, code and data. What made the
data is its lineage, and not part of the state: an upstream change that alters no byte leads to no other state. All of
it is in `dvc.lock`, so the key is the same if it is computed from a lock or from the working folder.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gradtrail.stages.common.dvc_cache import digest_within
from gradtrail.stages.common.files import digest, scratch_folder
from gradtrail.stages.common.params import PARAMS
from gradtrail.stages.common.pipeline_file import (
    TRAIN,
    Entry,
    StageSpec,
    contains_path,
    has_shape,
    is_below_training,
    live_entry,
    locked_entry,
    output_digests,
    read_locks,
    read_pipeline,
    sha256_of,
    stages_before,
    values_of,
)
from gradtrail.stages.common.stage import Stage
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import one_line
from gradtrail.support.paths import private_folder, working_folder


def state_key(stage: str, entry: Entry) -> str:
    """Return the key of a stage's state: sha256, as 64 hexadecimal digits."""
    return sha256_of({"stage": stage, "cmd": entry.cmd, "params": entry.params, "deps": entry.deps})


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of DVC's experiments."""

    name: str
    baseline: str  # commit that it started from
    commit: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A `dvc.yaml` and a `dvc.lock` that belong together, with those of the optional pipelines if there are any."""

    pipeline: dict[str, StageSpec]
    lock: dict[str, Any]  # stage → its section
    commit: str = ""  # first commit that has both files
    experiment: Experiment | None = None


@dataclass(frozen=True)
class State(Stage):
    """A stage, and the state that it makes or made."""

    def entry(self, name: str) -> Entry:
        """Return what determines the outputs of this stage, or of a stage before it."""
        raise NotImplementedError

    def out_digests(self) -> dict[str, str]:
        """Return the digest of each output."""
        raise NotImplementedError

    def state_of(self, name: str) -> str:
        return state_key(name, self.entry(name))

    @cached_property
    def state(self) -> str:
        """Key of the state that this stage makes or made."""
        return self.state_of(self.name)

    def member_state(self, seeds: Mapping[str, int]) -> str:
        """Return the key of the state that trains one member alone, by the seeds of its random numbers."""
        seed = next(iter(seeds.values())) if len({*seeds.values()}) == 1 else dict(seeds)
        return self._state_with(seed=seed, members=1, vary=[*seeds])

    @property
    def variant(self) -> str:
        """Key of this training's state without its seed: trainings that differ in nothing else have the same key."""
        return self._state_with(seed=None)

    def _state_with(self, **changes: Any) -> str:
        """Return the key of the state with these params of the training."""
        entry = self.entry(self.name)
        section = entry.params[str(PARAMS)]
        params = {**entry.params, str(PARAMS): {**section, TRAIN: {**section.get(TRAIN, {}), **changes}}}
        return state_key(self.name, dataclasses.replace(entry, params=params))

    def scratch(self) -> AbstractContextManager[Path]:
        """Return a folder for unfinished outputs of this state: no two processes make a state at the same time."""
        return scratch_folder(self.folder, f"{self.name}-{self.state[:16]}")

    @property
    def is_below_training(self) -> bool:
        """Whether the stage's run is a child of a training's run."""
        return is_below_training(self.name, self.pipeline)

    @property
    def experiment(self) -> str:
        """Name of the experiment in MLflow that has the stage's runs."""
        return "models" if self.name == TRAIN or self.is_below_training else "data"

    @cached_property
    def lineage(self) -> list[str]:
        """This stage and all before it, in the pipeline's order."""
        return [*stages_before(self.name, self.pipeline), self.name]

    def describe_lineage(self) -> dict[str, dict[str, Any]]:
        """Return, for this stage and each before it, its state and what determines it: command, params and deps."""
        return {name: {"state": self.state_of(name), **dataclasses.asdict(self.entry(name))} for name in self.lineage}


@dataclass(frozen=True)
class WorkingState(State):
    """The state that a stage makes of the working folder."""

    entries: dict[str, Entry] = field(default_factory=dict, compare=False)  # stage → entry that was read before

    def entry(self, name: str) -> Entry:
        """Return what determines the outputs of this stage, or of a stage before it.

        For a stage before this one, that is the entry of `dvc.lock` unless the working folder has other outputs: later
        changes of its code or params do not count, and in a partial checkout some deps and outputs are missing. In any
        other case, it is the files as they are now; FileNotFoundError is raised if a dep of this stage is missing.
        """
        if name not in self.entries:
            is_before = name != self.name and name in self._lock and name in self.lineage
            if is_before and not self._has_other_outs(name):
                self.entries[name] = locked_entry(self._lock[name])
            else:
                self.entries[name] = live_entry(self.pipeline[name], self.folder, is_partial=name != self.name)
        return self.entries[name]

    def out_digests(self) -> dict[str, str]:
        return {out: digest(self.folder / out) for out in self.spec.outs}

    def _has_other_outs(self, name: str) -> bool:
        """Whether the working folder has an output of a stage with another content than `dvc.lock` names."""
        outs = output_digests(self._lock[name]).items()
        return any((self.folder / out).exists() and digest(self.folder / out) != md5 for out, md5 in outs)

    @cached_property
    def _lock(self) -> dict[str, Any]:
        return read_locks(self.folder)


@dataclass(frozen=True, kw_only=True)
class RecordedState(State):
    """The state of a stage that a snapshot records."""

    snapshot: Snapshot
    place: Path | None = None  # folder with the outputs, once they are restored

    @cached_property
    def folder(self) -> Path:
        return self.place or working_folder()

    @cached_property
    def pipeline(self) -> dict[str, StageSpec]:
        return self.snapshot.pipeline

    @property
    def commit(self) -> str:
        """The commit that records the state; empty if none does."""
        return self.snapshot.commit

    def entry(self, name: str) -> Entry:
        return locked_entry(self.snapshot.lock[name])

    def out_digests(self) -> dict[str, str]:
        return output_digests(self.snapshot.lock[self.name])

    @property
    def is_sound(self) -> bool:
        """Whether the lock has this stage and all before it as declared, each made from the outputs of those before it.

        If only some stages of a changed pipeline were run, the sections of a lock do not belong together. Files in a
        folder whose listing DVC's cache lacks are assumed to match.
        """
        lock = self.snapshot.lock
        if not all(name in lock and has_shape(lock[name], self.pipeline[name]) for name in self.lineage):
            return False
        outs = {out: md5 for name in self.lineage for out, md5 in output_digests(lock[name]).items()}
        return all(
            digest_within(out, outs[out], dep) in (md5, None)
            for name in self.lineage
            for dep, md5 in self.entry(name).data.items()
            for out in outs
            if contains_path(out, dep)
        )


class PlannedStages:
    """States of the working folder's stages under params that differ from `params.yaml`; files are read once."""

    def __init__(self) -> None:
        self.pipeline = read_pipeline()
        self.params = read_yaml(PARAMS)
        self.lock = read_locks(Path())
        self._digests: dict[str, str] = {}  # dep → digest of the file or folder as it is now; empty if it is missing

    def values(self, stage: str, params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the values that a stage reads, by params file, if `params.yaml` has this content."""
        files = self.pipeline[stage].params
        contents = {name: params if name == str(PARAMS) else read_yaml(Path(name)) for name in files}
        return {name: values_of(contents[name], keys, name) for name, keys in files.items()}

    def entry(self, stage: str, params: Mapping[str, Any], outs: Mapping[str, str]) -> Entry | None:
        """Return what determines a stage's outputs, given those before it (path → digest); None if a dep is unknown."""
        deps = {dep: self.digest(dep, outs) for dep in self.pipeline[stage].deps}
        if "" in deps.values():
            return None
        return Entry(cmd=self.pipeline[stage].cmd, params=self.values(stage, params), deps=deps)

    def locked_outs(self, stage: str, entry: Entry | None) -> dict[str, str] | None:
        """Return the outputs of a stage, path → digest, if `dvc.lock` records this entry."""
        section = self.lock.get(stage)
        return output_digests(section) if section and locked_entry(section) == entry else None

    def digest(self, dep: str, outs: Mapping[str, str]) -> str:
        """Return the digest of a dep, that of an output of `outs` or else of the current file; empty if unknown."""
        for out, md5 in outs.items():
            if contains_path(out, dep):
                return digest_within(out, md5, dep) or ""
        if dep not in self._digests:
            self._digests[dep] = digest(Path(dep)) if Path(dep).exists() else ""
        return self._digests[dep]


def lock_file(stage: str, state: str) -> FileLock:
    """Return the lock of a state, not acquired."""
    return FileLock(private_folder() / "locks" / f"{stage}-{state[:32]}.lock")


@contextlib.contextmanager
def state_lock(stage: str, state: str) -> Iterator[None]:
    """Hold the lock of a state; if another process holds it, print that and wait.

    Two processes would write the same outputs, and log every point of a curve twice. The operating system releases the
    lock of a process that was killed. If no lock can be made, a warning is printed.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = lock_file(stage, state)
            try:
                stack.enter_context(lock.acquire(timeout=0))
            except Timeout:
                print(f"{stage}: another process is already making this state; waiting for it", file=sys.stderr)
                stack.enter_context(lock.acquire())
        except OSError as error:
            why = f"the state could not be locked against a second process: {one_line(error)}"
            print(f"warning: {stage}: {why}", file=sys.stderr)
        yield
