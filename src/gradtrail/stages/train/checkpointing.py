"""What lies in an Orbax checkpoint, opened array by array.

Orbax itself takes the memory that a checkpoint declares before it looks whether there is so much, and where files are
damaged it prints the faults of its threads. Out of scope: how arrays make a tree.

Checkpoints of an unfinished training, so that a killed one goes on to the same bits.

They lie in `.gradtrail/resume/<state>/` of the root, a folder for each state and kind of device; whoever makes a state
holds its lock. A checkpoint counts only with the file beside it that holds its digest, which is written last: one that
was cut off or damaged is told of and passed over for the one before. When the training is complete, the folder goes.
"""

import dataclasses
import math
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from gradtrail.core.common.pytrees import add_prefix, leaves_by_name, strip_prefix
from gradtrail.core.train.history import History
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.step import StepRecord, TrainState
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.support.errors import one_line
from gradtrail.support.paths import private_folder

_METADATA = "/zarr.json"  # of an array, after its name
_READING = {"open": True, "fill_missing_data_reads": False}  # what is not there is not taken for zeros


def open_arrays(checkpoint: Path) -> dict[str, Any]:
    """Return all arrays of a checkpoint by name, as TensorStores; nothing but their metadata is read.

    Raises:
        ValueError: the files are damaged.
    """
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{checkpoint / 'state'}/"}}
    keys = [key.decode() for key in ts.KvStore.open(base).result().list().result()]
    names = [key.removesuffix(_METADATA) for key in keys if key.endswith(_METADATA)]
    specs = {name: {"driver": "zarr3", "kvstore": {**base, "path": f"{name}/"}, **_READING} for name in names}
    return {name: ts.open(spec, read=True).result() for name, spec in specs.items()}


def declared_bytes(array: Any) -> int:
    """Return what an array would take in memory, or a piece of it where that is larger."""
    layout = array.chunk_layout
    shapes = (array.shape, layout.read_chunk.shape or (), layout.write_chunk.shape or ())
    return max(math.prod(shape) for shape in shapes) * array.dtype.numpy_dtype.itemsize


_KEPT = 2  # checkpoints: the last one, and the one before in case the last is damaged
_SPARE_BYTES = 2**20  # small arrays share a compressed file
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training had come.

    Attributes:
        state: after `step` optimizer steps.
        records: of the epoch under way; None where it had not begun.
        seconds: that the training had taken.
    """

    step: int
    state: TrainState
    records: StepRecord | None
    history: History
    seconds: float


class ResumeFolder:
    """The checkpoints of one training, to write and to read.

    Args:
        folder: of these checkpoints alone; None to write none.
        every_seconds: from one checkpoint to the next.
        clock: returns seconds.
    """

    def __init__(self, folder: Path | None, every_seconds: float, clock: Callable[[], float]):
        self._folder = folder
        self._every_seconds = every_seconds
        self._clock = clock
        self._last = clock()
        self._writing: threading.Thread | None = None
        self._fault: Exception | None = None

    def load(self, state: TrainState, records: StepRecord, history_of: Callable[[Arrays], History]) -> Progress | None:
        """Return the last whole checkpoint, or None where there is none; say which one, on stderr.

        Args:
            state: of the same training, whose shapes, dtypes and places count.
            records: likewise.
            history_of: makes a history of its arrays.
        """
        for path in reversed(self._checkpoints()):
            try:
                arrays = _read(path)
                progress = Progress(
                    step=int(arrays["step"]),
                    state=_with_arrays(state, strip_prefix("state", arrays)),
                    records=_with_arrays(records, found) if (found := strip_prefix("records", arrays)) else None,
                    history=history_of(strip_prefix("history", arrays)),
                    seconds=float(arrays["seconds"]),
                )
                if progress.step != int(progress.state.step):
                    raise ValueError(f"it says step {progress.step}, its state is after {progress.state.step}")
            except Exception as error:  # whatever is wrong with it, the one before may do
                print(
                    f"train: {path.name} is no whole checkpoint ({one_line(error)[:200]}); passed over", file=sys.stderr
                )
                continue
            print(f"train: going on after step {progress.step:,}, from a checkpoint", file=sys.stderr)
            return progress
        return None

    def tick(self, chunk: Chunk, history: History, seconds: float) -> None:
        """Write a checkpoint in the background, if it is time for one and none is being written."""
        is_due = self._clock() - self._last >= self._every_seconds
        if self._folder is None or not is_due or (self._writing and self._writing.is_alive()):
            return
        self._finish_writing()
        self._last = self._clock()
        arrays = _as_arrays(chunk, history, seconds)
        self._writing = threading.Thread(target=self._write, args=(chunk.step, arrays), daemon=True)
        self._writing.start()

    def save(self, chunk: Chunk, history: History, seconds: float) -> None:
        """Write a checkpoint now."""
        self._finish_writing()
        if self._folder is not None:
            self._write(chunk.step, _as_arrays(chunk, history, seconds))
            self._finish_writing()

    def remove(self) -> None:
        """Remove all checkpoints: the training is complete."""
        self._finish_writing()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, step: int, arrays: Arrays) -> None:
        from orbax.checkpoint import v1 as ocp  # late: most trainings end before the first checkpoint is due

        path = self._place(step)
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            context = ocp.Context()
            context.array.saving.use_compression = False  # then an array is no larger than the files that hold it
            with context:
                ocp.save(path, arrays)
            with atomic_file(_seal(path)) as beside:
                beside.write_text(digest(path))
            for old in self._checkpoints()[:-_KEPT]:
                _seal(old).unlink()
                shutil.rmtree(old)
        except Exception as error:  # told of from the training's own thread
            self._fault = error

    def _finish_writing(self) -> None:
        """Wait for a checkpoint under way, and warn of a fault: a training goes on without checkpoints."""
        if self._writing:
            self._writing.join()
            self._writing = None
        if self._fault:
            print(f"train: warning: a checkpoint could not be written: {one_line(self._fault)[:200]}", file=sys.stderr)
            self._fault = None

    def _place(self, step: int) -> Path:
        assert self._folder is not None  # noqa: S101 - whoever writes has asked
        return self._folder.resolve() / f"step_{step:09d}"

    def _checkpoints(self) -> list[Path]:
        """Return all that are sealed, the oldest first."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return [seal.with_suffix("") for seal in sorted(self._folder.resolve().glob("step_*.digest"))]


def resume_folder(state: str, runtime: RuntimeConfig, *, clock: Callable[[], float]) -> ResumeFolder:
    """Return the checkpoints of the state with this key; none under a debug switch.

    Other devices add in another order, and so end with other bits: each kind has its own.
    """
    devices = jax.local_devices()
    name = f"{state[:32]}-{devices[0].platform}{len(devices)}"
    debugging = runtime.debug_nans or runtime.disable_jit
    folder = None if debugging else private_folder() / "resume" / name
    return ResumeFolder(folder, runtime.checkpoint_seconds, clock)


def _seal(path: Path) -> Path:
    return path.with_name(f"{path.name}.digest")


def _read(path: Path) -> Arrays:

    if digest(path) != _seal(path).read_text():
        raise ValueError("its digest is another one")
    arrays = open_arrays(path)
    on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    declared = sum(map(declared_bytes, arrays.values()))
    if declared > on_disk + _SPARE_BYTES:
        raise ValueError(f"it declares {declared} bytes of arrays, but has {on_disk}")
    return {name: array.read().result() for name, array in arrays.items()}


def _as_arrays(chunk: Chunk, history: History, seconds: float) -> Arrays:
    """Return copies on the host, since the next step reuses the memory; what is empty is left out."""
    state = dataclasses.replace(chunk.state, key=jax.random.key_data(chunk.state.key))
    arrays = add_prefix("state", leaves_by_name(state)) | add_prefix("history", history.as_arrays())
    if not chunk.ends_epoch:
        arrays |= add_prefix("records", leaves_by_name(chunk.records))
    arrays |= {"step": np.array(chunk.step), "seconds": np.array(seconds)}
    return {name: np.array(value) for name, value in arrays.items() if np.size(value)}


def _with_arrays(like: Any, arrays: Arrays) -> Any:
    """Return a pytree like `like`, at its places, with the leaves of a checkpoint."""
    found = []
    for name, leaf in leaves_by_name(like).items():
        value = arrays[name]
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        expected = jax.random.key_data(leaf) if is_key else leaf
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise ValueError(f"leaf {name} is {value.dtype}{value.shape}, not {expected.dtype}{expected.shape}")
        found.append(jax.device_put(jax.random.wrap_key_data(jnp.asarray(value)) if is_key else value, leaf.sharding))
    return jax.tree.unflatten(jax.tree.structure(like), found)
