"""Logs the learning curves of a training while it runs."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax

from gradtrail.core.train.config import MemberSeeds
from gradtrail.core.train.history import History
from gradtrail.core.train.loop import Chunk
from gradtrail.stages.train.checkpoints import Checkpoints
from gradtrail.stages.train.privacy import redacted_history, redacted_steps
from gradtrail.stages.train.tables import epoch_table, step_table
from gradtrail.stages.train.training import Training
from gradtrail.tracking.artifacts import Curves, curves
from gradtrail.tracking.journal import Journal
from gradtrail.tracking.state import state_lock


class TrainingLog:
    """Logs a compiled training to its run: the listener that `Training.run` takes."""

    def __init__(self, run: Journal, training: Training):
        self._run = run
        self._training = training

    @contextlib.contextmanager
    def member(self, training: Training, seeds: MemberSeeds) -> Iterator[Checkpoints]:
        """Yield the checkpoints of a network; those of one of several stay, for trainings with other members."""
        stage, state = self._run.stage, self._run.stage.member_state(dataclasses.asdict(seeds))
        with state_lock(stage.name, state) if state != stage.state else contextlib.nullcontext():  # its lock is held
            checkpoints = training.checkpoints(state, user=stage.state)
            is_kept = training.config.members > 1 or checkpoints.is_complete
            if checkpoints.has_checkpoints:
                self._run.timings(resumed=True)
            yield checkpoints
            if not is_kept:
                self._run.at_end(checkpoints.remove)

    def after_epoch(self, history: History, seconds: float) -> None:
        """Log the points that the last epoch adds to the curves; those of means over members are known at the end."""
        if self._training.config.members > 1:
            return
        with self._run.best_effort():
            public = redacted_history(history, self._training.config.privacy)
            points = live_curves(public, self._training.program.num_steps, self._training.epsilons)
            self._run.curves({**points, "train/elapsed_seconds": {history.epochs[-1].epoch: seconds}})

    def diverged(self, chunk: Chunk) -> None:
        """Log the steps of the epoch in which the training diverged."""
        program = self._training.program
        with self._run.best_effort():
            records = redacted_steps(jax.device_get(chunk.records), self._training.config.privacy)
            steps = step_table([records], before=(chunk.epoch - 1) * program.steps_per_epoch)
            self._run.curves(curves(epoch_table([]), steps[steps["step"] <= chunk.step], program.num_steps))


def live_curves(history: History, planned_steps: int, epsilons: Sequence[float] = ()) -> Curves:
    """Return the points that a training's last epoch adds to its curves."""
    steps_before = sum(len(part.loss) for part in history.steps[:-1])
    epochs = epoch_table(history.epochs[-1:], epsilons)
    return curves(epochs, step_table(history.steps[-1:], before=steps_before), planned_steps)
