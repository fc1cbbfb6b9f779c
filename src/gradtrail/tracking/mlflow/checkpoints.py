"""The checkpoint of a finished training on its run, in the smallest form from which training can continue.

It is a compressed Orbax checkpoint of the training state; the final weights, which the run has as a model, are left out
if the state has the same bits. `docs/checkpoints.md` shows how to continue the training.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from gradtrail.core.nn.models import HostParams
from gradtrail.core.train.step import TrainState
from gradtrail.stages.train.checkpoints import digest, import_orbax, single_process, state_on_device, state_on_host
from gradtrail.support.errors import UserError, one_line

_WEIGHTS = ("params", "average")  # fields of a state that may be the final weights


def save_checkpoint(folder: Path, state: TrainState, weights: HostParams) -> None:
    """Write a state to a folder that does not exist yet, without what is equal to the final weights."""
    whole = state_on_host(state)
    left_out = [name for name in _WEIGHTS if digest(getattr(whole, name)) == digest(weights)]
    stored = _with(whole, left_out, None)
    metadata = {"left_out": left_out, "digest": digest(whole)}
    ocp, options = import_orbax(), single_process()
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
    with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
        checkpointer.save(folder.resolve(), args=ocp.args.StandardSave(stored), custom_metadata=metadata)


def load_checkpoint(folder: Path, like: TrainState, weights: HostParams) -> TrainState:
    """Read a state, onto the devices of `like`.

    Args:
        folder: Artifact `checkpoint` of a training's run.
        like: State of the same training, such as `Program.init` returns.
        weights: Final weights of the same run.

    Raises:
        UserError: The folder has no such state, is damaged, or the weights are of another run.
    """
    import_orbax()
    from orbax.checkpoint import v1 as ocp

    try:
        about = ocp.metadata(folder.resolve())
        names = [*about.custom_metadata["left_out"]]
    except (OSError, ValueError, LookupError, TypeError) as error:  # raised by Orbax if files are damaged
        raise _not_of_this_training(folder, error) from error
    left_out = [name for name in _WEIGHTS if name in names]
    expected = _with(state_on_host(like), left_out, None)
    _check_leaves(folder, about.metadata, expected)
    try:
        stored = ocp.load(folder.resolve(), expected)
    except (OSError, ValueError, LookupError) as error:  # raised by TensorStore
        raise _not_of_this_training(folder, error) from error
    state = _with(stored, left_out, weights)
    if digest(state) != about.custom_metadata.get("digest"):
        raise UserError(f"{folder}: it is damaged, or the weights are not the final ones of its run")
    return state_on_device(state, like)


def _with(state: TrainState, names: list[str], value: HostParams | None) -> TrainState:
    changes: dict[str, Any] = dict.fromkeys(names, value)
    return dataclasses.replace(state, **changes)


def _not_of_this_training(folder: Path, why: object) -> UserError:
    return UserError(f"{folder}: no checkpoint of this training: {one_line(why)[:300]}")


def _check_leaves(folder: Path, actual: Any, expected: Any) -> None:
    """Raise UserError unless a checkpoint has the leaves that are expected, by path, dtype and shape."""
    actual_leaves, expected_leaves = _described(actual), _described(expected)
    for path in sorted(actual_leaves.keys() | expected_leaves.keys()):
        actual_leaf, expected_leaf = actual_leaves.get(path, "absent"), expected_leaves.get(path, "absent")
        if actual_leaf != expected_leaf:
            raise _not_of_this_training(folder, f"leaf {path} is {actual_leaf}, this training has {expected_leaf}")


def _described(tree: Any) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(key, simple=True, separator="/"): f"{x.dtype}{tuple(x.shape)}" for key, x in leaves}
