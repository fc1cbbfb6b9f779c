"""What MLflow shows of a training while it runs: learning curves, and a trace of some steps."""

import tempfile
from pathlib import Path

import jax

from gradtrail.core.train.history import History
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.step import TrainState
from gradtrail.stages.train.tables import epoch_table, step_table
from gradtrail.tracking.mlflow.artifacts import Curves, curves
from gradtrail.tracking.mlflow.run import TrackedRun


class TrainingLog:
    """Logs a training to its run: the listener that `stages/train/loop.py` asks for.

    Args:
        run: of the training.
        steps_per_epoch: optimizer steps in an epoch.
        planned_steps: of all epochs asked for; early stopping may leave some undone.
        trace: whether to record a trace of some steps.
    """

    def __init__(self, run: TrackedRun, *, steps_per_epoch: int, planned_steps: int, trace: bool):
        self._run = run
        self._steps_per_epoch = steps_per_epoch
        self._planned_steps = planned_steps
        self._trace = StepTrace(run, wanted=trace)

    def after_chunk(self, state: TrainState) -> None:
        """Trace the second chunk, if asked to."""
        self._trace.after_chunk(state)

    def after_epoch(self, history: History, seconds: float) -> None:
        """Log the points that the last epoch adds to the curves."""
        self._run.curves(live_curves(history, self._planned_steps))
        self._run.curves({"train/elapsed_seconds": {history.epochs[-1].epoch: seconds}})

    def diverged(self, chunk: Chunk) -> None:
        """Log the steps of the epoch that is not complete."""
        self._run.curves(curves_of_steps(chunk, self._steps_per_epoch, self._planned_steps))


def live_curves(history: History, planned_steps: int) -> Curves:
    """Return the part of a training's curves that its last epoch adds."""
    steps_before = sum(len(part.loss) for part in history.steps[:-1])
    return curves(epoch_table(history.epochs[-1:]), step_table(history.steps[-1:], before=steps_before), planned_steps)


def curves_of_steps(chunk: Chunk, steps_per_epoch: int, planned_steps: int) -> Curves:
    """Return the curves of the steps done in an epoch that is not complete."""
    before = (chunk.epoch - 1) * steps_per_epoch
    steps = step_table([jax.device_get(chunk.records)], before=before)
    return curves(epoch_table([]), steps[steps["step"] <= chunk.step], planned_steps)


class StepTrace:
    """Records the second chunk of a training, the first being warm-up, and hands the files to the row.

    Args:
        row: that gets them, under `trace/`.
        wanted: whether to record at all.
    """

    def __init__(self, row: TrackedRun, wanted: bool):
        self._row = row
        self._folder = tempfile.TemporaryDirectory() if wanted else None
        self._chunks = 0

    def after_chunk(self, state: object) -> None:
        """Begin after the first chunk, end after the second, whose results are in `state`."""
        if self._folder is None:
            return
        self._chunks += 1
        if self._chunks == 1:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder.name, create_perfetto_trace=True)
        elif self._chunks == 2:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            for path in Path(self._folder.name).rglob("*perfetto_trace*"):
                self._row.files(path, "trace")
            self._folder.cleanup()
