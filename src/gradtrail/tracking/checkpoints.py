"""The checkpoint of a finished training on its run, from which training can continue: `docs/pipeline.md` shows how.

It is a compressed Orbax checkpoint of the training state, without the final weights: the run has them as a model.
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
    metadata = {"left_out": left_out, "digest": digest(whole)}
    ocp, options = import_orbax(), single_process()
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
    with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
        stored = ocp.args.StandardSave(_with(whole, left_out, None))
        checkpointer.save(folder.resolve(), args=stored, custom_metadata=metadata)


def load_checkpoint(folder: Path, like: TrainState, weights: HostParams) -> TrainState:
    """Read a state, onto the devices of `like`; UserError if it is damaged, or of another training.

    Args:
        folder: Artifact `checkpoint` of a training's run.
        like: State of the same training, such as `Program.init` returns.
        weights: Final weights of the same run.
    """
    import_orbax()
    from orbax.checkpoint import v1 as ocp

    try:
        about = ocp.metadata(folder.resolve())
        left_out = about.custom_metadata["left_out"]
        expected = _with(state_on_host(like), left_out, None)
        # Orbax checks neither dtypes nor shapes.
        stored, needed = _described(about.metadata), _described(expected)
        if differing := sorted(dict(stored.items() ^ needed.items())):
            leaf = differing[0]
            actual = stored.get(leaf, "absent")
            raise ValueError(f"leaf {leaf} is {actual}, this training has {needed.get(leaf, 'absent')}")
        state = _with(ocp.load(folder.resolve(), expected), left_out, weights)
    except (OSError, ValueError, LookupError, TypeError) as error:  # Orbax raises these for damaged files
        raise UserError(f"{folder}: no checkpoint of this training: {one_line(error)[:300]}") from error
    if digest(state) != about.custom_metadata.get("digest"):
        raise UserError(f"{folder}: it is damaged, or the weights are not the final ones of its run")
    return state_on_device(state, like)


def _with(state: TrainState, names: list[str], value: HostParams | None) -> TrainState:
    changes: dict[str, Any] = dict.fromkeys(names, value)
    return dataclasses.replace(state, **changes)


def _described(tree: Any) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(key, simple=True, separator="/"): f"{x.dtype}{tuple(x.shape)}" for key, x in leaves}
