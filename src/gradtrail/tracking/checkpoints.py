"""The compressed Orbax checkpoint of a finished training on its run, to train on: `docs/pipeline.md` shows how."""

from pathlib import Path
from typing import Any

import jax

from gradtrail.core.train.step import TrainState
from gradtrail.stages.train.checkpoints import digest, import_orbax, single_process, state_on_device, state_on_host
from gradtrail.support.errors import UserError, one_line


def save_checkpoint(folder: Path, state: TrainState) -> None:
    """Write a state to a folder that does not exist yet."""
    on_host, ocp, options = state_on_host(state), import_orbax(), single_process()
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
    with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
        args, metadata = ocp.args.StandardSave(on_host), {"digest": digest(on_host)}
        checkpointer.save(folder.resolve(), args=args, custom_metadata=metadata)


def load_checkpoint(folder: Path, like: TrainState) -> TrainState:
    """Read a state, onto the devices of `like`; UserError if it is damaged, or of another training.

    Args:
        folder: Artifact `checkpoint` of a training's run.
        like: State of the same training, such as `TrainingFunctions.init` returns.
    """
    import_orbax()
    from orbax.checkpoint import v1 as ocp

    try:
        about, expected = ocp.metadata(folder.resolve()), state_on_host(like)
        # Orbax checks neither dtypes nor shapes.
        stored, needed = _described(about.metadata), _described(expected)
        if differing := sorted(dict(stored.items() ^ needed.items())):
            leaf = differing[0]
            actual = stored.get(leaf, "absent")
            raise ValueError(f"leaf {leaf} is {actual}, this training has {needed.get(leaf, 'absent')}")
        state = ocp.load(folder.resolve(), expected)
    except (OSError, ValueError, LookupError, TypeError) as error:  # Orbax raises these for damaged files
        raise UserError(f"{folder}: no checkpoint of this training: {one_line(error)[:300]}") from error
    if digest(state) != about.custom_metadata.get("digest"):
        raise UserError(f"{folder}: it is damaged")
    return state_on_device(state, like)


def _described(tree: Any) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(key, simple=True, separator="/"): f"{x.dtype}{tuple(x.shape)}" for key, x in leaves}
