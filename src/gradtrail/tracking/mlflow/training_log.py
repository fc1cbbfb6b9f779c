"""Logs the learning curves of a training while it runs."""

import dataclasses
from collections.abc import Sequence

import jax

from gradtrail.core.train.history import History
from gradtrail.core.train.loop import Chunk, Program
from gradtrail.core.train.privacy import NOT_PRIVATE, PrivacyConfig
from gradtrail.core.train.step import TrainState
from gradtrail.stages.train.release import redacted_history, redacted_steps
from gradtrail.stages.train.tables import epoch_table, step_table
from gradtrail.tracking.mlflow.artifacts import Curves, curves
from gradtrail.tracking.mlflow.run import TrackedRun


class TrainingLog:
    """Logs a training to its run: the listener that `stages/train/loop.py` asks for.

    Args:
        run: Run of the training.
        engine: Program of the training.
        is_live: True if the curves are those of this training; else they are means over members, known at the end.
        epsilons: Epsilon after each epoch of a private training; else empty.
        privacy: Config that decides which statistics of the training examples are published.
    """

    def __init__(
        self,
        run: TrackedRun,
        engine: Program,
        *,
        is_live: bool,
        epsilons: Sequence[float] = (),
        privacy: PrivacyConfig = NOT_PRIVATE,
    ):
        self._epsilons, self._privacy = epsilons, privacy
        self._is_live = is_live
        self._run = run
        self._steps_per_epoch = engine.steps_per_epoch
        self._planned_steps = engine.num_steps

    def after_chunk(self, state: TrainState) -> None:
        """Log nothing: curves grow by epochs, and the state may not be computed yet."""

    def after_epoch(self, history: History, seconds: float) -> None:
        """Log the points that the last epoch adds to the curves."""
        if not self._is_live:
            return
        with self._run.best_effort():
            points = live_curves(redacted_history(history, self._privacy), self._planned_steps, self._epsilons)
            self._run.curves({**points, "train/elapsed_seconds": {history.epochs[-1].epoch: seconds}})

    def diverged(self, chunk: Chunk) -> None:
        """Log the steps of the epoch in which the training diverged."""
        with self._run.best_effort():
            records = redacted_steps(jax.device_get(chunk.records), self._privacy)
            public_chunk = dataclasses.replace(chunk, records=records)
            self._run.curves(curves_of_steps(public_chunk, self._steps_per_epoch, self._planned_steps))


def live_curves(history: History, planned_steps: int, epsilons: Sequence[float] = ()) -> Curves:
    """Return the points that a training's last epoch adds to its curves."""
    steps_before = sum(len(part.loss) for part in history.steps[:-1])
    epochs = epoch_table(history.epochs[-1:], epsilons)
    return curves(epochs, step_table(history.steps[-1:], before=steps_before), planned_steps)


def curves_of_steps(chunk: Chunk, steps_per_epoch: int, planned_steps: int) -> Curves:
    """Return the curves of the steps of an unfinished epoch."""
    before = (chunk.epoch - 1) * steps_per_epoch
    steps = step_table([jax.device_get(chunk.records)], before=before)
    return curves(epoch_table([]), steps[steps["step"] <= chunk.step], planned_steps)
