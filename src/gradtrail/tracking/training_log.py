"""Logs the learning curves of a training while it runs, and reports one that needs attention."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence

import jax

from gradtrail.core.train.config import MemberSeeds
from gradtrail.core.train.history import EpochMetrics, History
from gradtrail.core.train.loop import Chunk
from gradtrail.stages.dp.redaction import redacted_history, redacted_steps
from gradtrail.stages.train.checkpoints import Checkpoints
from gradtrail.stages.train.tables import epoch_table, step_table
from gradtrail.stages.train.training import Training
from gradtrail.tracking.alerts import NOT_FINITE, Alert, Sender, Watch
from gradtrail.tracking.live import LiveRun
from gradtrail.tracking.record import Points
from gradtrail.tracking.render import curves
from gradtrail.tracking.state import state_lock


class TrainingLog:
    """Logs a compiled training to its run: the listener that `Training.run` takes."""

    def __init__(self, run: LiveRun, training: Training):
        self._run = run
        self._training = training
        self._sender = Sender(training.runtime.alert)
        self._raised = set[str]()  # kinds of alerts: each once in a run
        self._watch = self._new_watch()

    @contextlib.contextmanager
    def member(self, training: Training, seeds: MemberSeeds) -> Iterator[Checkpoints]:
        """Yield the checkpoints of a network; those of one of several stay, for trainings with other members."""
        stage, state = self._run.stage, self._run.stage.member_state(dataclasses.asdict(seeds))
        self._watch = self._new_watch()
        with state_lock(stage.name, state) if state != stage.state else contextlib.nullcontext():  # its lock is held
            checkpoints = training.checkpoints(state, user=stage.state)
            is_kept = training.config.members > 1 or checkpoints.is_complete
            yield checkpoints
            if not is_kept:
                self._run.at_end(checkpoints.remove)

    def after_epoch(self, history: History, seconds: float) -> None:
        """Log the points that the last epoch adds to the curves; those of means over members are known at the end."""
        public = redacted_history(history, self._training.config.privacy)
        last = public.epochs[-1]
        rate = float(history.steps[-1]["learning_rate"][-1]) / self._training.config.optimizer.learning_rate
        for alert in self._watch.after_epoch(last, rate):
            self._report(alert, int(last["epoch"]), last)
        if self._training.config.members > 1:
            return
        with self._run.best_effort():
            points = live_curves(public, self._training.compiled.num_steps, self._training.epsilons)
            self._run.curves({**points, "train/elapsed_seconds": {last["epoch"]: seconds}})

    def diverged(self, chunk: Chunk) -> None:
        """Log the steps of the epoch in which the training diverged."""
        compiled = self._training.compiled
        with self._run.best_effort():
            records = redacted_steps(jax.device_get(chunk.records.metrics), self._training.config.privacy)
            steps = step_table([records], before=(chunk.epoch - 1) * compiled.steps_per_epoch)
            self._run.curves(curves(epoch_table([]), steps[steps["step"] <= chunk.step], compiled.num_steps))
        self._report(NOT_FINITE, chunk.epoch)

    def _new_watch(self) -> Watch:
        return Watch(self._training.config.epochs, self._training.info.num_classes)

    def _report(self, alert: Alert, epoch: int, last: EpochMetrics | None = None) -> None:
        """Print an alert, tag the run and send it, once for each kind."""
        if alert.kind in self._raised:
            return
        self._raised.add(alert.kind)
        stage = self._run.stage
        if alert is not NOT_FINITE:  # else the stage ends with a more detailed message
            print(f"{stage.name}: {alert.kind}: {alert.message}", file=sys.stderr)
        self._run.alert(f"{alert.kind}: {alert.message}")
        metrics = {name: value for name, value in last.items() if math.isfinite(value)} if last else {}
        about = {"state": stage.state, "stage": stage.name, "alert": alert.kind, "message": alert.message}
        self._sender.send(about | {"epoch": epoch, "metrics": metrics})


def live_curves(history: History, planned_steps: int, epsilons: Sequence[float] = ()) -> Points:
    """Return the points that a training's last epoch adds to its curves."""
    steps_before = sum(len(part["loss"]) for part in history.steps[:-1])
    epochs = epoch_table(history.epochs[-1:], epsilons)
    points = curves(epochs, step_table(history.steps[-1:], before=steps_before), planned_steps)
    skipped = [part["skipped"].sum() for part in history.steps if "skipped" in part]
    return {**points, **({"train/skipped_steps": {len(skipped): float(sum(skipped))}} if skipped else {})}
