"""The process that `benchmarks.dialects` times: four forms of one training, in random order.

    python -m benchmarks.dialect_peers FIELDS

`FIELDS` are those of a `Task`. Reports the seconds of the first calls, which compile, and then the seconds of a
step for each round.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.turns import answer, read_task

DIALECTS = ("raw", "linen", "nnx", "equinox")
NUM_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process times."""

    seed: int  # of the order in which the programs run
    batch_size: int
    steps: int  # per burst of called steps, and per epoch
    packages: tuple[str, ...] = ()


class Training:
    """A training in one dialect, with its current state."""

    def __init__(self, dialect: str) -> None:
        self.program: Any = importlib.import_module(f"benchmarks.dialect_programs.{dialect}")
        self.state = self.program.start(with_raw_weights(self.program.init(jax.random.key(0))))

    def run_steps(self, images: jax.Array, labels: jax.Array) -> list[jax.Array]:
        """Call a jitted step for each batch, and return the losses."""
        losses = []
        for batch in zip(images, labels, strict=True):
            self.state, loss = self.program.train_step(self.state, *batch)
            losses.append(loss)
        return jax.block_until_ready(losses)

    def run_epoch(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        """Call the compiled loop over all batches, and return the losses."""
        self.state, losses = self.program.train_epoch(self.state, images, labels)
        return jax.block_until_ready(losses)


def with_raw_weights(network: Any) -> Any:
    """Return a network with the initial weights of the raw program, transposed if it stores them so."""
    weights = jax.tree.leaves(importlib.import_module("benchmarks.dialect_programs.raw").init(jax.random.key(0)))
    by_shape = {array.shape: array for leaf in weights for array in (leaf, leaf.T)}  # no two layers share a shape
    return jax.tree.map(lambda leaf: by_shape[leaf.shape], network)


def make_batches(task: Task) -> tuple[jax.Array, jax.Array]:
    """Draw random images and labels: (steps, batch, pixels) and (steps, batch)."""
    rng = np.random.default_rng(0)
    images = rng.random((task.steps, task.batch_size, 784), np.float32)
    labels = rng.integers(0, NUM_CLASSES, images.shape[:2], np.int32)
    return jax.numpy.asarray(images), jax.numpy.asarray(labels)


def seconds_of(function: Callable[..., object], *arguments: Any) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def main() -> None:
    """Compile everything, then time a burst of each whenever asked."""
    task = read_task(Task)
    rng = np.random.default_rng(task.seed)
    jax.config.update("jax_enable_compilation_cache", False)
    images, labels = make_batches(task)
    jax.block_until_ready(jax.jit(lambda images: images @ images.swapaxes(1, 2))(images))  # loads the compiler

    # The first program to compile pays for what all share, so the order is random here too.
    trainings = {str(dialect): Training(dialect) for dialect in rng.permutation(DIALECTS)}
    step, epoch = (images[:1], labels[:1]), (images, labels)
    compiled = {
        dialect: {"step": seconds_of(training.run_steps, *step), "epoch": seconds_of(training.run_epoch, *epoch)}
        for dialect, training in trainings.items()
    }

    def make_round() -> dict[str, dict[str, float]]:
        ways = [(dialect, way) for dialect in DIALECTS for way in ("step", "epoch")]
        seconds: dict[str, dict[str, float]] = {dialect: {} for dialect in DIALECTS}
        for dialect, way in rng.permutation(ways):
            training = trainings[dialect]
            burst = training.run_steps if way == "step" else training.run_epoch
            seconds[dialect][way] = seconds_of(burst, *epoch) / task.steps
        return seconds

    answer(compiled, make_round)


if __name__ == "__main__":
    main()
