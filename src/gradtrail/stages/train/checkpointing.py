"""Checkpoints of an unfinished training, so that a killed one resumes and ends with the same bits.

Orbax' `Checkpointer` writes them in the background, into folders that are renamed when they are complete, and keeps the
last two. This module adds a seal next to each folder, which names the training and holds the digest of the files; it is
checked before Orbax opens any of them. A checkpoint that is incomplete, damaged or of another training is skipped for
the previous one; an error while a checkpoint with a valid seal is loaded is a bug, and is raised.

They are in `.gradtrail/resume/<state>/`, a folder for each state and type of device, whose lock the caller holds. Each
of several processes has the whole state, so process 0 alone writes: none waits for another, and killing another one
damages no checkpoint. All processes read them, from a shared folder.
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

from gradtrail.core.sharding import put
from gradtrail.core.train.history import History
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.step import StepRecord, TrainState
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.files import atomic_file, naming_file
from gradtrail.stages.common.processes import ALONE, Processes
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.train.orbax_setup import import_orbax, open_checkpointer, single_process
from gradtrail.support.errors import one_line
from gradtrail.support.paths import COMPLETE, USER, private_folder

_KEPT = 2  # checkpoints: the last one, and the previous one in case the last is damaged
_TENSORSTORE_ERROR = re.compile(r"(?!INVALID_ARGUMENT)[A-Z]+(_[A-Z]+)*: ")  # such as `OUT_OF_RANGE: `, for a full disk
_SPARE_BYTES = 2**20  # for the metadata of the arrays


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a training in a checkpoint."""

    step: int
    state: TrainState  # state after `step` optimizer steps
    records: StepRecord | None  # records of the unfinished epoch; None at the end of an epoch
    history: History
    seconds: float  # seconds of training so far


class ResumeFolder:
    """The checkpoints of one training, to write and to read.

    Args:
        folder: folder of these checkpoints alone; None to write none. Its name is part of their seals.
        every_seconds: time from one checkpoint to the next.
        clock: function that returns seconds.
        user: key of the state of the whole training, if this is one of its members.
        processes: processes of the training.
        inputs_changed: function that returns True if the stage's inputs have changed, so that a complete training is
            checkpointed too.
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
        self._writing: int | None = None  # the step of the checkpoint that is being written or not yet sealed
        self._has_warned = False  # since the last checkpoint that was written

    def load(
        self, state: TrainState, records: StepRecord, history_of: Callable[[dict[str, np.ndarray]], History]
    ) -> Progress | None:
        """Return the last valid checkpoint, or None if there is none.

        Args:
            state: any state of the same training, for structure, shapes, dtypes and devices.
            records: records of an epoch of the same training.
            history_of: function that makes a history from its arrays.
        """
        name = self._processes.agreed(self._last_valid)
        if name is None or self._folder is None:
            return None
        path = self._folder / name
        if self.is_complete and self._processes.is_first:
            (path.parent / COMPLETE).touch()  # `gradtrail gc` keeps those that were used last
        step = int(path.name.removeprefix("step_"))
        expected = {"state": state_on_host(state), "history": None}
        if step % len(records.loss):  # otherwise the checkpoint is at the end of an epoch
            expected["records"] = jax.tree.map(np.array, records)
        with single_process():
            restored = import_orbax().load_checkpointables(path, expected)
        return Progress(
            step=step,
            state=state_on_device(restored["state"], state),
            records=_placed(restored["records"], records) if "records" in restored else None,
            history=history_of(restored["history"]),
            seconds=float(restored["history"]["seconds"]),
        )

    def tick(self, chunk: Chunk, history: History, seconds: float) -> None:
        """Write a checkpoint in the background if one is due and none is being written."""
        with self._errors_as_warnings():
            if self._writing is not None and not self._checkpointer.is_saving_in_progress():
                self._finish()
        with self._errors_as_warnings():
            if self._writing is None and self._clock() - self._last >= self._every_seconds:
                self._start(chunk, history, seconds)

    def save(self, chunk: Chunk, history: History, seconds: float) -> None:
        """Write a checkpoint now."""
        with self._errors_as_warnings():
            self._finish()
        with self._errors_as_warnings():
            self._start(chunk, history, seconds)
            self._finish()

    @property
    def has_checkpoints(self) -> bool:
        """Whether there are checkpoints of an earlier attempt."""
        return self._folder is not None and self._folder.is_dir() and any(self._folder.iterdir())

    @property
    def is_complete(self) -> bool:
        """Whether the training is complete, and its last checkpoint is kept."""
        return self._folder is not None and (self._folder / COMPLETE).is_file()

    def end(self, chunk: Chunk, history: History, seconds: float, *, is_kept: bool) -> None:
        """Keep the last checkpoint of a complete training, or save one if its results will not be recorded."""
        if is_kept:
            self.keep(chunk, history, seconds)
        elif self._inputs_changed():
            self.save(chunk, history, seconds)

    def keep(self, chunk: Chunk, history: History, seconds: float) -> None:
        """Write the last checkpoint of a complete training, which stays, and remove the others."""
        self.save(chunk, history, seconds)
        self._close()
        with self._errors_as_warnings():
            if self._processes.is_first and self._folder and _seal(self._folder / _name(chunk.step)).is_file():
                older = {*self._folder.glob(_name("?" * 9))} - {self._folder / _name(chunk.step)}
                _remove(*older)
                self._remove_lone_seals()
                (self._folder / COMPLETE).touch()

    def remove(self) -> None:
        """Remove all checkpoints: the training is complete."""
        self._close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, chunk: Chunk, history: History, seconds: float) -> None:
        if self._folder is None or not self._processes.is_first:
            return
        self._last = self._clock()
        self._checkpointer = self._checkpointer or open_checkpointer(self._folder, _KEPT)
        self._folder.mkdir(parents=True, exist_ok=True)  # it may have been removed in the meantime
        if self._user:
            (self._folder / USER).write_text(self._user)
        # All are copies, since the next step reuses the memory. Orbax stores no empty array.
        so_far = history.as_arrays() | {"seconds": np.array(seconds)}
        parts: dict[str, Any] = {"state": state_on_host(chunk.state)}
        parts["history"] = {name: np.array(value) for name, value in so_far.items() if value.size}
        if not chunk.ends_epoch:
            parts["records"] = jax.tree.map(np.array, chunk.records)
        _require_space(self._folder, sum(leaf.nbytes for leaf in jax.tree.leaves(parts)))
        with _tensorstore_errors_as_oserror():
            self._checkpointer.save_checkpointables_async(chunk.step, parts, force=True)
        self._writing = chunk.step

    def _finish(self) -> None:
        """Wait for the checkpoint that is being written, and seal it."""
        if self._folder is None or self._writing is None:
            return
        with _tensorstore_errors_as_oserror():
            self._checkpointer.wait()
        path = self._folder / _name(self._writing)
        if _seal(path).is_dir():
            _remove(_seal(path))
        with atomic_file(_seal(path)) as temporary:
            temporary.write_text(self._sealed(path))
        self._writing, self._has_warned = None, False
        self._remove_lone_seals()

    @contextlib.contextmanager
    def _errors_as_warnings(self) -> Iterator[None]:
        """Turn I/O errors into warnings, one until a checkpoint is written again; the training continues."""
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
            with contextlib.suppress(OSError, ValueError):  # reported already
                checkpointer.close()

    def _last_valid(self) -> str | None:
        """Return the name of the newest checkpoint with a valid seal; remove those without, and report newer ones."""
        if self._folder is None:
            return None
        self._remove_lone_seals()
        newest = None
        for path in sorted(self._folder.glob(_name("?" * 9)), reverse=True):
            flaw = self._flaw(path)
            if flaw and newest is None:
                print(f"train: skipping the checkpoint {path.name}: {flaw}", file=sys.stderr)
            if flaw:  # otherwise the next checkpoint of that step would fail
                _remove(_seal(path), path)
            newest = newest or (None if flaw else path)
        return newest.name if newest else None

    def _remove_lone_seals(self) -> None:
        """Remove the seals whose checkpoints are gone."""
        if self._folder is not None:
            _remove(*(seal for seal in self._folder.glob("*.digest") if not seal.with_suffix("").exists()))

    def _flaw(self, path: Path) -> str:
        """Return the fault of a checkpoint; empty if there is none."""
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

    Devices of another type or number sum in another order and give other bits, so each has its own folder; the number
    of processes that share the devices makes no difference. `user` is the key of the state of the whole training, which
    may have several members. Process 0 decides on the keys; the values of other processes are ignored.
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


def state_on_device(on_host: TrainState, like: TrainState) -> TrainState:
    """Invert `state_on_host`; each leaf goes to the devices of that in `like`."""
    placed = _placed(on_host, like)
    return dataclasses.replace(placed, keys=jax.tree.map(jax.random.wrap_key_data, placed.keys))


def _placed(values: Any, like: Any) -> Any:
    return jax.tree.map(lambda value, leaf: put(value, leaf.sharding), values, like)


@contextlib.contextmanager
def _tensorstore_errors_as_oserror() -> Iterator[None]:
    """Turn a failed write of TensorStore, a ValueError that begins with the type of error, into an OSError."""
    try:
        yield
    except ValueError as error:
        if not _TENSORSTORE_ERROR.match(str(error)):
            raise
        raise OSError(one_line(error)) from error


def _require_space(folder: Path, num_bytes: int) -> None:
    """Raise OSError unless the disk has space: if a write fails half way, Orbax' threads print tracebacks."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, f"it takes {num_bytes:,} bytes, {free:,} are free", str(folder))


def _name(step: int | str) -> str:
    return f"step_{step:0>9}"


def _seal(path: Path) -> Path:
    return path.with_name(f"{path.name}.digest")


def _remove(*paths: Path) -> None:
    """Remove files and folders as far as possible; a later write in their place reports its own error."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
