"""The state that a stage makes or made, and the states before it, from `dvc.yaml`, `dvc.lock` and the files.

They are read from the working folder or from a snapshot. A lock lets only one process at a time make a state: two would
write the same outputs, and log every point of a curve twice. Out of scope: how the key is computed (`keys.py`).
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
    live_entry,
    locked_entry,
    output_digests,
    read_locks,
    stages_before,
    stages_below_training,
)
from gradtrail.stages.common.stage import Stage
from gradtrail.support.errors import one_line
from gradtrail.support.paths import private_folder, working_folder
from gradtrail.tracking.lineage.keys import state_key
from gradtrail.tracking.lineage.snapshots import Snapshot


@dataclass(frozen=True)
class Identity(Stage):
    """A stage, and the identity of its state."""

    from_lock: bool = False  # the state that `dvc.lock` records, or else the one that the stage is about to make
    snapshot: Snapshot | None = None  # snapshot that records the state; None for the working folder
    place: Path | None = None  # folder with its files; None for the working folder
    read_entries: Mapping[str, Entry] = field(default_factory=dict, compare=False)  # stage → entry read before

    @cached_property
    def folder(self) -> Path:
        """The folder that deps and outputs are relative to."""
        return self.place or working_folder()

    @cached_property
    def pipeline(self) -> dict[str, StageSpec]:
        """All stages."""
        return self.snapshot.pipeline if self.snapshot else super().pipeline

    def entry(self, name: str) -> Entry:
        """Return what determines the outputs of a stage.

        For a stage before this one, that is the entry of `dvc.lock` unless the working folder has other outputs: what
        made them counts, not later changes of code or params; and in a partial checkout some outputs are missing. In
        any other case, it is the files as they are now.

        Raises:
            FileNotFoundError: A dep of this stage is missing. Missing deps of stages before it are left out.
        """
        if name not in self._entries:
            locked = self._locked_entry(name)
            is_partial = name != self.name
            self._entries[name] = locked or live_entry(self.pipeline[name], self.folder, is_partial=is_partial)
        return self._entries[name]

    def state_of(self, name: str) -> str:
        """Return the key of the state of a stage."""
        return state_key(name, self.entry(name))

    @property
    def state(self) -> str:
        """Key of the state that this stage makes or made."""
        return self.state_of(self.name)

    def member_state(self, seeds: Mapping[str, int]) -> str:
        """Return the key of the state that trains one member alone, by the seeds of its random numbers."""
        entry = self.entry(self.name)
        params = {name: dict(values) for name, values in entry.params.items()}
        same = len({*seeds.values()}) == 1
        seed = next(iter(seeds.values())) if same else dict(seeds)
        section = params[str(PARAMS)][TRAIN]
        params[str(PARAMS)][TRAIN] = {**section, "seed": seed, "members": 1, "vary": list(seeds)}
        return state_key(self.name, dataclasses.replace(entry, params=params))

    def scratch(self) -> AbstractContextManager[Path]:
        """Return a folder for unfinished outputs of this state: no two processes make a state at the same time."""
        return scratch_folder(self.folder, f"{self.name}-{self.state[:16]}")

    @property
    def is_below_training(self) -> bool:
        """Whether the run of this stage is a child of a training's run."""
        return self.name in stages_below_training(self.pipeline)

    @property
    def experiment(self) -> str:
        """Name of the experiment in MLflow that has the stage's runs."""
        return "models" if self.name == TRAIN or self.is_below_training else "data"

    @property
    def lineage(self) -> list[str]:
        """This stage and all before it, in the pipeline's order."""
        return [*stages_before(self.name, self.pipeline), self.name]

    def describe_lineage(self) -> dict[str, dict[str, Any]]:
        """Return, for this stage and each before it, its state and what determines it: command, params and deps."""
        return {name: {"state": self.state_of(name), **dataclasses.asdict(self.entry(name))} for name in self.lineage}

    @property
    def is_sound(self) -> bool:
        """Whether the lock has this stage and all before it as declared, each made from the outputs of those before it.

        If only some stages of a changed pipeline were run, the sections of a lock do not belong together. Files in a
        folder whose listing DVC's cache lacks are assumed to match.
        """
        if not all(name in self._lock and has_shape(self._lock[name], self.pipeline[name]) for name in self.lineage):
            return False
        outs = {out: md5 for name in self.lineage for out, md5 in self._locked_outs(name).items()}
        return all(
            digest_within(out, outs[out], dep) in (md5, None)
            for name in self.lineage
            for dep, md5 in self.entry(name).data.items()
            for out in outs
            if contains_path(out, dep)
        )

    def out_digests(self) -> dict[str, str]:
        """Return the digest of each output: from the lock, or of the files that were just written."""
        if self.from_lock:
            return self._locked_outs(self.name)
        return {out: digest(self.folder / out) for out in self.spec.outs}

    def has_outs_of_lock(self, name: str) -> bool:
        """Whether the outputs in the working folder are those that `dvc.lock` names for a stage."""
        outs = self._locked_outs(name).items()
        return all((self.folder / out).exists() and digest(self.folder / out) == md5 for out, md5 in outs)

    def _has_other_outs(self, name: str) -> bool:
        """Whether the working folder has an output of a stage with another content than `dvc.lock` names."""
        outs = self._locked_outs(name).items()
        return any((self.folder / out).exists() and digest(self.folder / out) != md5 for out, md5 in outs)

    def _locked_outs(self, name: str) -> dict[str, str]:
        return output_digests(self._lock[name])

    def _locked_entry(self, name: str) -> Entry | None:
        is_before = name != self.name and name in self.lineage
        if not (self.from_lock or is_before) or name not in self._lock:
            return None
        trusted = self.from_lock or not self._has_other_outs(name)
        return locked_entry(self._lock[name]) if trusted else None

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        return dict(self.read_entries)

    @cached_property
    def _lock(self) -> dict[str, Any]:
        if self.snapshot:
            return self.snapshot.lock
        return read_locks(self.folder)


@contextlib.contextmanager
def state_lock(stage: Identity) -> Iterator[None]:
    """Hold the lock of the state that a stage is about to make; see `lock_of`."""
    with lock_of(stage.name, stage.state):
        yield


@contextlib.contextmanager
def lock_of(stage: str, state: str) -> Iterator[None]:
    """Hold the lock of a state; if another process holds it, print that and wait.

    The operating system releases the lock of a process that was killed. If no lock can be made, a warning is printed.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = private_folder() / "locks"
            folder.mkdir(exist_ok=True)
            lock = FileLock(folder / f"{stage}-{state[:32]}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                print(f"{stage}: another process is already making this state; waiting for it", file=sys.stderr)
                lock.acquire()
            stack.callback(lock.release)
        except OSError as error:
            print(
                f"warning: {stage}: the state could not be locked against a second process: {one_line(error)}",
                file=sys.stderr,
            )
        yield
