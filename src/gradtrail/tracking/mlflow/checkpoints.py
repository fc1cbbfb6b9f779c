"""Orbax checkpoints of a whole training state. They carry timestamps: for MLflow and for resuming, never a DVC out."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from orbax.checkpoint import v1 as ocp

from gradtrail.core.train.step import TrainState
from gradtrail.stages.train.checkpointing import declared_bytes, open_arrays
from gradtrail.support.errors import UserError, one_line


def save_checkpoint(folder: Path, state: TrainState) -> None:
    """Write `state` to a folder that does not exist yet."""
    ocp.save(folder.resolve(), _with_key_data(state))


@contextlib.contextmanager
def temporary_checkpoint(state: TrainState) -> Iterator[Path]:
    """Yield a folder that holds a checkpoint of `state` for as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder) / "checkpoint", state)
        yield Path(folder) / "checkpoint"


def load_checkpoint(folder: Path, like: TrainState) -> TrainState:
    """Read a state whose shapes and dtypes are those of `like`, which may be abstract, to the default device.

    Raises:
        UserError: the folder holds no such state. Refused before memory of another size is taken.
    """
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # whichever device it was written from
    shapes = jax.eval_shape(_with_key_data, like)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), shapes)
    try:
        _check_arrays(folder.resolve(), abstract)
        restored: TrainState = ocp.load(folder.resolve(), abstract)
    except Exception as error:  # whatever is wrong with it
        raise UserError(f"{folder}: no checkpoint of this state: {one_line(error)[:200]}") from error
    return dataclasses.replace(restored, key=jax.random.wrap_key_data(restored.key))


def _check_arrays(folder: Path, abstract: TrainState) -> None:
    """Raise ValueError unless a checkpoint has arrays like those of a state, in pieces no larger than themselves."""
    arrays = open_arrays(folder)
    found = sorted((array.shape, array.dtype.name) for array in arrays.values())
    expected = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(abstract))
    if found != expected:
        raise ValueError("it holds arrays of other shapes")
    for name, array in arrays.items():
        if declared_bytes(array) > max(1, array.size) * array.dtype.numpy_dtype.itemsize:
            raise ValueError(f"{name} is read in pieces larger than itself")


def _with_key_data(state: TrainState) -> TrainState:
    """Replace the typed key, which Orbax cannot store, by its bits."""
    return dataclasses.replace(state, key=jax.random.key_data(state.key))
