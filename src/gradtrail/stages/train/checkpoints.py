"""Checkpoints of an unfinished training, so that a killed one resumes and ends with the same bits.

Orbax' `CheckpointManager` writes them in the background, into folders that are renamed when they are complete, and
keeps the last two. Their metadata has the SHA-256 of the arrays: one that is damaged is skipped for the previous one.

They are in `.gradtrail/resume/<state>/`, a folder for each state and type of device, whose lock the caller holds. Each
of several processes has the whole state, so process 0 alone writes, and all read, from a shared folder. Out of scope:
what a training saves, and the checkpoint of a finished one (`tracking/checkpoints.py`).
"""

import contextlib
import dataclasses
import errno
import hashlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gradtrail.core.sharding import put
from gradtrail.core.train.step import TrainState
from gradtrail.stages.common.processes import agreed
from gradtrail.support.errors import one_line
from gradtrail.support.paths import COMPLETE, USER, private_folder

_KEPT = 2  # checkpoints: the last one, and the previous one in case the last is damaged
_SPARE_BYTES = 2**20  # for the metadata of the arrays
_PREFIX = "step"
# What Orbax raises for files that are missing, damaged or cannot be written; TensorStore's errors are ValueErrors
_ERRORS = (OSError, ValueError, LookupError, TypeError)


class Checkpoints:
    """The checkpoints of the training of one network.

    Args:
        folder: Folder of these checkpoints alone; None to write none.
        every_seconds: Time from one checkpoint to the next.
        clock: Function that returns seconds.
        user: Key of the state of the whole training, if this network is one of its members.
    """

    def __init__(
        self, folder: Path | None, every_seconds: float, clock: Callable[[], float] = time.monotonic, user: str = ""
    ):
        self._folder = folder and folder.resolve()
        self._every_seconds = every_seconds
        self._clock = clock
        self._user = user
        self._last = clock()
        self._manager: Any = None  # Orbax', from the first checkpoint on
        self._has_warned = False  # since the last checkpoint that was written

    @property
    def is_complete(self) -> bool:
        """Whether the training is complete, and its last checkpoint is kept."""
        return self._folder is not None and (self._folder / COMPLETE).is_file()

    def restore(self, like: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the parts of the last valid checkpoint, with NumPy arrays; None if there is none.

        Args:
            like: Part → a pytree of the same structure; PRNG keys are restored as their bits. A part that is absent
                here, or None, is returned as a flat dict of named arrays; one absent from the checkpoint is None.
        """
        valid: dict[int, dict[str, np.ndarray]] = {}  # of process 0, which looks for it
        step = agreed(lambda: self._last_valid(valid))
        if step is None or self._folder is None:
            return None
        if self.is_complete and _writes():
            (self._folder / COMPLETE).touch()  # `gradtrail gc` keeps those that were used last
        arrays = valid.get(step) or self._read(step)
        if not _writes():
            self._close()
        parts: dict[str, Any] = dict.fromkeys(like)
        for name in {key.partition(".")[0] for key in arrays}:
            prefix = f"{name}."
            part: Any = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
            if like.get(name) is not None:
                part = jax.tree.unflatten(jax.tree.structure(like[name]), [part[key] for key in _by_name(like[name])])
            parts[name] = part
        return parts

    def save_if_due(self, step: int, parts: Callable[[], Mapping[str, Any]]) -> None:
        """Write a checkpoint in the background if one is due and none is being written; `parts` are copied first."""
        if self._clock() - self._last < self._every_seconds:
            return
        if self._manager is not None and self._manager.is_saving_in_progress():
            return
        with self._errors_as_warnings():
            self._wait()
        with self._errors_as_warnings():
            self._start(step, parts)

    def save(self, step: int, parts: Callable[[], Mapping[str, Any]]) -> None:
        """Write a checkpoint now.

        Args:
            step: Number of optimizer steps since the beginning.
            parts: Function that returns part → pytree of arrays, each by the name that `restore` returns it by.
        """
        with self._errors_as_warnings():
            self._wait()
        with self._errors_as_warnings():
            self._start(step, parts)
            self._wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written: Orbax needs the other processes until its end."""
        with self._errors_as_warnings():
            self._wait()

    def keep(self, step: int, parts: Callable[[], Mapping[str, Any]]) -> None:
        """Write the last checkpoint of a complete training, which stays, and remove the others."""
        self.save(step, parts)
        steps = self._manager.all_steps() if self._manager is not None else []
        if self._folder is not None and step in steps:
            with self._errors_as_warnings():
                for older in set(steps) - {step}:
                    self._manager.delete(older)
                (self._folder / COMPLETE).touch()
        self._close()

    def remove(self) -> None:
        """Remove all checkpoints: the training is complete."""
        self._close()
        if self._folder is not None and _writes():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, step: int, parts: Callable[[], Mapping[str, Any]]) -> None:
        if self._folder is None or not _writes():
            return
        self._last = self._clock()
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._user:
            (self._folder / USER).write_text(self._user)
        arrays = {name: _copy(leaf) for name, leaf in _by_name(parts()).items()}
        # Orbax stores no empty array: they are in the metadata
        empty = {name: [str(array.dtype), array.shape] for name, array in arrays.items() if not array.size}
        manager = self._open()
        # If a write failed half way, Orbax' threads would print tracebacks
        size, free = sum(array.nbytes for array in arrays.values()), shutil.disk_usage(self._folder).free
        if free < size + _SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"it takes {size:,} bytes, {free:,} are free", str(self._folder))
        manager.save(
            step,
            args=import_orbax().args.PyTreeSave({name: array for name, array in arrays.items() if array.size}),
            custom_metadata={"digest": digest(arrays), "empty": empty},
        )

    def _wait(self) -> None:
        """Wait for the checkpoint that is being written; raise the error that it failed with."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._has_warned = False

    def _last_valid(self, valid: dict[int, dict[str, np.ndarray]]) -> int | None:
        """Return the step of the newest valid checkpoint, and put its arrays into `valid`; remove newer ones."""
        if self._folder is None or not any(self._folder.glob(f"{_PREFIX}_*")):
            return None
        manager = self._open()
        for step in sorted(manager.all_steps(), reverse=True):
            try:
                valid[step] = self._read(step)
                return int(step)
            except _ERRORS as error:
                print(f"train: skipping the checkpoint of step {step}: {one_line(error)[:200]}", file=sys.stderr)
                manager.delete(step)
        return None

    def _read(self, step: int) -> dict[str, np.ndarray]:
        """Return the arrays of a checkpoint by name; raise one of `_ERRORS` if it is damaged."""
        manager = self._open()
        arrays: dict[str, np.ndarray] = manager.restore(step, args=import_orbax().args.PyTreeRestore())
        about = manager.metadata(step).custom_metadata
        for name, (dtype, shape) in about.get("empty", {}).items():
            arrays[name] = np.empty(shape, dtype)
        if about.get("digest") != digest(arrays):
            raise ValueError("its arrays do not match their digest")
        return arrays

    def _open(self) -> Any:
        """Return Orbax' manager of the folder; opening it removes what a killed process left incomplete."""
        if self._manager is None:
            ocp = import_orbax()
            self._manager = ocp.CheckpointManager(
                self._folder,
                # not compressed: a checkpoint is short-lived, and the processor is the training's
                item_handlers=ocp.PyTreeCheckpointHandler(
                    use_compression=False, multiprocessing_options=single_process()
                ),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=_KEPT,
                    step_prefix=_PREFIX,
                    step_format_fixed_length=9,
                    create=False,
                    cleanup_tmp_directories=_writes(),
                    multiprocessing_options=single_process(),
                ),
            )
        return self._manager

    @contextlib.contextmanager
    def _errors_as_warnings(self) -> Iterator[None]:
        """Turn errors of writing into warnings, one until a checkpoint is written again; the training continues."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._close()
            if not self._has_warned:
                print(f"train: warning: a checkpoint could not be written: {one_line(error)[:200]}", file=sys.stderr)
            self._has_warned = True

    def _close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(OSError, ValueError):  # reported already
                manager.close()


def checkpoint_folder(state: str, shards: int) -> Path:
    """Return the folder of the checkpoints of the state with this key, which process 0 determines.

    Devices of another type or number sum in another order and give other bits, so each has its own folder; the number
    of processes that share the devices makes no difference.
    """
    name = agreed(lambda: f"{state[:32]}-{jax.local_devices()[0].platform}{shards}")
    return private_folder() / "resume" / name


def state_on_host(state: TrainState) -> TrainState:
    """Copy a state to the host, its keys as bits; the next step, which reuses the memory, does not overwrite it."""
    return jax.tree.map(_copy, state)


def state_on_device(on_host: TrainState, like: TrainState) -> TrainState:
    """Invert `state_on_host`; each leaf goes to the devices of that in `like`."""
    placed = on_devices(on_host, like)
    return dataclasses.replace(placed, keys=jax.tree.map(jax.random.wrap_key_data, placed.keys))


def on_devices(values: Any, like: Any) -> Any:
    """Copy a pytree of arrays to the devices of the arrays in `like`."""
    return jax.tree.map(lambda value, leaf: put(value, leaf.sharding), values, like)


def digest(tree: Any) -> str:
    """Return the SHA-256 of all arrays of a pytree, in order."""
    sha256 = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        sha256.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes())
    return sha256.hexdigest()


def import_orbax() -> Any:
    """Import Orbax, late: it takes a second, and most trainings end before the first checkpoint is due."""
    import orbax.checkpoint as ocp

    for name in ("absl", "asyncio"):  # they log, at length, the errors that Orbax raises too
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return ocp


def single_process() -> Any:
    """Return options by which Orbax writes and reads in this process, without waiting for others."""
    index = jax.process_index()
    return import_orbax().options.MultiprocessingOptions(primary_host=index, active_processes={index})


def _writes() -> bool:
    return jax.process_index() == 0


def _copy(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(leaf) if is_key else leaf)


def _by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by their path, whose parts are separated by dots."""
    keystr = jax.tree_util.keystr
    return {keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
