"""Checkpoints of a training that never was: its chunks and its history, saved and loaded."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from factories import run_keys

from gradtrail.core.train.batch_gradient import RowRecord
from gradtrail.core.train.history import History
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.step import StepRecord, TrainState
from gradtrail.stages.train.checkpointing import Progress, ResumeFolder

STATE = "ab12-cpu1"  # a folder's name
STEPS = 3  # in an epoch, of 4 examples each


def weights(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"layers": {0: {"kernel": rng.normal(size=(4, 3)).astype(np.float32), "bias": np.zeros(3, np.float32)}}}


def make_chunk(step: int) -> Chunk:
    """Chunk after a step of a training that never was."""
    rng = np.random.default_rng(step)
    names = ("loss", "cross_entropy", "accuracy", "grad_norm")
    numbers = {name: rng.normal(size=STEPS).astype(np.float32) for name in names}
    probability = rng.uniform(size=(STEPS, 4)).astype(np.float32)
    rows = RowRecord(
        indices=np.arange(4 * STEPS, dtype=np.int32).reshape(STEPS, 4),
        probability=probability,
        correct=probability > 0.5,
    )
    absent: dict[str, Any] = {"part_grad_norm": None, "loss_scale": None, "skipped": None}
    records = StepRecord(
        num_examples=np.full(STEPS, 4, np.int32), learning_rate=numbers["loss"], rows=rows, **numbers, **absent
    )
    state = TrainState(
        step=np.int32(step),
        params=weights(step),
        opt_state=(optax.EmptyState(), optax.TraceState(weights(step + 1))),
        keys=run_keys(step),
        average=None,
        loss_scale=None,
    )
    state, records = jax.device_put((state, records))
    return Chunk(epoch=1 + (step - 1) // STEPS, ends_epoch=step % STEPS == 0, step=step, state=state, records=records)


def make_history(step: int) -> History:
    history = History((0, 1), weights(0))
    for end in range(STEPS, step + 1, STEPS):
        history.add(make_chunk(end), weights(end), {"loss": 1.0, "accuracy": 0.5})
    return history


def save(folder: ResumeFolder, *steps: int) -> None:
    for step in steps:
        folder.save(make_chunk(step), make_history(step), seconds=2.5)


def load(folder: Path) -> Progress | None:
    like = make_chunk(1)
    new_history = History((0, 1), weights(0))
    return ResumeFolder(folder, 0.0, lambda: 0.0).load(like.state, like.records, new_history.restore)


def bits(tree: object) -> list[bytes]:
    plain = jax.tree.map(lambda leaf: jax.random.key_data(leaf) if "key" in str(leaf.dtype) else leaf, tree)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
