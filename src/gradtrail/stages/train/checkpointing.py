"""Checkpoints of an unfinished training, so that a killed one resumes and ends with the same bits.

Orbax' `Checkpointer` writes them in the background, into folders that get their name when they are complete, and keeps
the last two. What is added here: a seal beside each folder, which names the training and holds the digest of the files,
and is checked before Orbax opens any of them. A checkpoint that is incomplete, damaged or of another training is
skipped for the one before; an error while a checkpoint with a valid seal is loaded is a bug, and is raised.

They lie in `.gradtrail/resume/<state>/`, a folder for each state and kind of device, whose lock the caller holds. Of
several processes each has the whole state, so that process 0 alone writes: none waits for another, and a kill of any
other spoils no checkpoint. All read it, from a folder that all of them see.
"""

import contextlib
import dataclasses
import errno
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gradtrail.core.common.sharding import put
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.step import StepRecord, TrainState
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.files import atomic_file, naming_file
from gradtrail.stages.common.processes import ALONE, Processes
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.train.histories import Histories
from gradtrail.stages.train.orbax_setup import by_itself, import_orbax, open_checkpointer
from gradtrail.support.errors import one_line
from gradtrail.support.paths import COMPLETE, USER, private_folder

_KEPT = 2  # checkpoints: the last one, and the one before in case the last is damaged
_OF_TENSORSTORE = re.compile(r"(?!INVALID_ARGUMENT)[A-Z]+(_[A-Z]+)*: ")  # such as `OUT_OF_RANGE: `, of a full disk
_SPARE_BYTES = 2**20  # for what describes the arrays


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A training as a checkpoint has it.

    Attributes:
        state: after `step` optimizer steps.
        records: of the epoch under way; None at the end of an epoch.
        seconds: of training until then.
    """

    step: int
    state: TrainState
    records: StepRecord | None
    history: Histories
    seconds: float


class ResumeFolder:
    """The checkpoints of one training, to write and to read.

    Args:
        folder: of these checkpoints alone; None to write none. Its name is part of their seals.
        every_seconds: from one checkpoint to the next.
        clock: returns seconds.
        user: key of the state that is made, if it is another one: a training with this member.
        processes: that train together.
        inputs_changed: whether the stage's inputs have changed, so that a complete training is checkpointed too.
    """

    def __init__(
        self,
        folder: Path | None,
        every_seconds: float,
        clock: Callable[[], float],
        user: str = "",
        processes: Processes = ALONE,
        inputs_changed: Callable[[], bool] = lambda: False,
    ):
        self._folder = folder and folder.resolve()
        self._user = user
        self._processes = processes
        self._inputs_changed = inputs_changed
        self._every_seconds = every_seconds
        self._clock = clock
        self._last = clock()
        self._checkpointer: Any = None  # Orbax', from the first checkpoint on
        self._writing: int | None = None  # the step of the checkpoint that is under way or not yet sealed
        self._has_warned = False  # since the last checkpoint that was written

    def load(
        self, state: TrainState, records: StepRecord, history_of: Callable[[dict[str, np.ndarray]], Histories]
    ) -> Progress | None:
        """Return the last valid checkpoint, or None if there is none.

        Args:
            state: any state of the same training; gives structure, shapes, dtypes and devices.
            records: likewise, of an epoch.
            history_of: makes a history from its arrays.
        """
        name = self._processes.agreed(self._last_valid)
        if name is None or self._folder is None:
            return None
        path = self._folder / name
        if self.is_complete and self._processes.is_first:
            (path.parent / COMPLETE).touch()  # the ones that were used last are kept
        step = int(path.name.removeprefix("step_"))
        expected = {"state": state_on_host(state), "history": None}
        if step % len(records.loss):  # else no epoch was under way
            expected["records"] = jax.tree.map(np.array, records)
        with by_itself():
            found = import_orbax().load_checkpointables(path, expected)
        return Progress(
            step=step,
            state=state_on_device(found["state"], state),
            records=_placed(found["records"], records) if "records" in found else None,
            history=history_of(found["history"]),
            seconds=float(found["history"]["seconds"]),
        )

    def tick(self, chunk: Chunk, history: Histories, seconds: float) -> None:
        """Write a checkpoint in the background if one is due and none is being written."""
        with self._fault_as_warning():
            if self._writing is not None and not self._checkpointer.is_saving_in_progress():
                self._finish()
        with self._fault_as_warning():
            if self._writing is None and self._clock() - self._last >= self._every_seconds:
                self._start(chunk, history, seconds)

    def save(self, chunk: Chunk, history: Histories, seconds: float) -> None:
        """Write a checkpoint now."""
        with self._fault_as_warning():
            self._finish()
        with self._fault_as_warning():
            self._start(chunk, history, seconds)
            self._finish()

    @property
    def is_begun(self) -> bool:
        """Whether there is something of an earlier attempt."""
        return self._folder is not None and self._folder.is_dir() and any(self._folder.iterdir())

    @property
    def is_complete(self) -> bool:
        """Whether the training is complete, and its last checkpoint is kept."""
        return self._folder is not None and (self._folder / COMPLETE).is_file()

    def end(self, chunk: Chunk, history: Histories, seconds: float, *, is_kept: bool) -> None:
        """Keep the last checkpoint of a complete training, or save one if its results will not be recorded."""
        if is_kept:
            self.keep(chunk, history, seconds)
        elif self._inputs_changed():
            self.save(chunk, history, seconds)

    def keep(self, chunk: Chunk, history: Histories, seconds: float) -> None:
        """Write the last checkpoint of a complete training, which stays, and remove the others."""
        self.save(chunk, history, seconds)
        self._close()
        with self._fault_as_warning():
            if self._processes.is_first and self._folder and _seal(self._folder / _name(chunk.step)).is_file():
                others = {*self._folder.glob(_name("?" * 9))} - {self._folder / _name(chunk.step)}
                _remove(*others)
                self._remove_lone_seals()
                (self._folder / COMPLETE).touch()

    def remove(self) -> None:
        """Remove all checkpoints: the training is complete."""
        self._close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, chunk: Chunk, history: Histories, seconds: float) -> None:
        if self._folder is None or not self._processes.is_first:
            return
        self._last = self._clock()
        self._checkpointer = self._checkpointer or open_checkpointer(self._folder, _KEPT)
        self._folder.mkdir(parents=True, exist_ok=True)  # it may have been removed meanwhile
        if self._user:
            (self._folder / USER).write_text(self._user)
        # All are copies, since the next step reuses the memory. Orbax stores no empty array.
        so_far = history.as_arrays() | {"seconds": np.array(seconds)}
        parts: dict[str, Any] = {"state": state_on_host(chunk.state)}
        parts["history"] = {name: np.array(value) for name, value in so_far.items() if value.size}
        if not chunk.ends_epoch:
            parts["records"] = jax.tree.map(np.array, chunk.records)
        _require_space(self._folder, sum(leaf.nbytes for leaf in jax.tree.leaves(parts)))
        with _fault_of_tensorstore():
            self._checkpointer.save_checkpointables_async(chunk.step, parts, force=True)
        self._writing = chunk.step

    def _finish(self) -> None:
        """Wait for the checkpoint under way, and seal it."""
        if self._folder is None or self._writing is None:
            return
        with _fault_of_tensorstore():
            self._checkpointer.wait()
        path = self._folder / _name(self._writing)
        if _seal(path).is_dir():
            _remove(_seal(path))
        with atomic_file(_seal(path)) as beside:
            beside.write_text(self._sealed(path))
        self._writing, self._has_warned = None, False
        self._remove_lone_seals()

    @contextlib.contextmanager
    def _fault_as_warning(self) -> Iterator[None]:
        """Warn of an I/O error, despite which the training goes on, once until a checkpoint is written again."""
        try:
            with naming_file(self._folder) if self._folder else contextlib.nullcontext():
                yield
        except OSError as error:
            self._close()
            if not self._has_warned:
                print(f"train: warning: a checkpoint could not be written: {one_line(error)[:200]}", file=sys.stderr)
            self._has_warned = True

    def _close(self) -> None:
        checkpointer, self._checkpointer, self._writing = self._checkpointer, None, None
        if checkpointer is not None:
            with contextlib.suppress(OSError, ValueError):  # reported already, or of no use any more
                checkpointer.close()

    def _last_valid(self) -> str | None:
        """Return the name of the newest checkpoint with a valid seal; remove those without, and report newer ones."""
        if self._folder is None:
            return None
        self._remove_lone_seals()
        found = None
        for path in sorted(self._folder.glob(_name("?" * 9)), reverse=True):
            flaw = self._flaw(path)
            if flaw and found is None:
                print(f"train: skipping the checkpoint {path.name}: {flaw}", file=sys.stderr)
            if flaw:  # else the next checkpoint of that step would fail
                _remove(_seal(path), path)
            found = found or (None if flaw else path)
        return found.name if found else None

    def _remove_lone_seals(self) -> None:
        """Remove the seals whose checkpoints are gone."""
        if self._folder is not None:
            _remove(*(seal for seal in self._folder.glob("*.digest") if not seal.with_suffix("").exists()))

    def _flaw(self, path: Path) -> str:
        """Return what is wrong with a checkpoint, empty if nothing is."""
        try:
            is_good = _seal(path).read_bytes() == self._sealed(path).encode()
        except FileNotFoundError:
            return "it has no seal, so its write was interrupted"
        except OSError as error:
            return one_line(error)[:200]
        return "" if is_good else "its files, step or training do not match its seal"

    def _sealed(self, path: Path) -> str:
        """Return the content of a seal: training, step, and digest of the files."""
        return f"{path.parent.name} {path.name} {digest(path)}\n"


def resume_folder(
    state: str,
    runtime: RuntimeConfig,
    shards: int,
    *,
    processes: Processes,
    clock: Callable[[], float],
    user: str = "",
    inputs_changed: Callable[[], bool] = lambda: False,
) -> ResumeFolder:
    """Return the checkpoints of the state with this key; none under a debug switch.

    Devices of another kind or number sum in another order and give other bits, so each has its own folder; how many
    processes share the devices makes no difference. `user` is the key of the state that is made, which may have several
    members. Process 0 knows the keys; of the others it does not matter what they pass.
    """
    debugging = runtime.debug_nans or runtime.disable_jit
    name = processes.agreed(lambda: f"{state[:32]}-{jax.local_devices()[0].platform}{shards}")
    folder = None if debugging else private_folder() / "resume" / name
    return ResumeFolder(
        folder, runtime.checkpoint_seconds, clock, "" if user == state else user, processes, inputs_changed
    )


def state_on_host(state: TrainState) -> TrainState:
    """Copy a state to the host, its key as bits; the next step, which reuses the memory, does not overwrite it."""
    return jax.tree.map(np.array, dataclasses.replace(state, keys=jax.tree.map(jax.random.key_data, state.keys)))


def state_on_device(found: TrainState, like: TrainState) -> TrainState:
    """Invert `state_on_host`; each leaf goes to the devices of that in `like`."""
    placed = _placed(found, like)
    return dataclasses.replace(placed, keys=jax.tree.map(jax.random.wrap_key_data, placed.keys))


def _placed(found: Any, like: Any) -> Any:
    return jax.tree.map(lambda value, leaf: put(value, leaf.sharding), found, like)


@contextlib.contextmanager
def _fault_of_tensorstore() -> Iterator[None]:
    """Raise what TensorStore cannot write as an OSError; it raises a ValueError that begins with the kind of fault."""
    try:
        yield
    except ValueError as error:
        if not _OF_TENSORSTORE.match(str(error)):
            raise
        raise OSError(one_line(error)) from error


def _require_space(folder: Path, num_bytes: int) -> None:
    """Raise OSError unless the disk has room: if a write fails half way, Orbax' threads print tracebacks."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, f"it takes {num_bytes:,} bytes, {free:,} are free", str(folder))


def _name(step: int | str) -> str:
    return f"step_{step:0>9}"


def _seal(path: Path) -> Path:
    return path.with_name(f"{path.name}.digest")


def _remove(*paths: Path) -> None:
    """Remove files and folders, as far as it is possible; a checkpoint in their place would say what it met."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
