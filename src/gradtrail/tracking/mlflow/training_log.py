"""What MLflow shows of a training while it runs: learning curves, and a trace of some steps."""

import tempfile
from pathlib import Path
from typing import Self

import jax

from gradtrail.core.train.history import History
from gradtrail.core.train.loop import Chunk, Engine
from gradtrail.core.train.step import TrainState
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.train.tables import epoch_table, step_table
from gradtrail.tracking.mlflow.artifacts import Curves, curves
from gradtrail.tracking.mlflow.run import TrackedRun


class TrainingLog:
    """Logs a training to its run: the listener that `stages/train/loop.py` asks for; a context manager.

    Args:
        run: of the training.
        engine: that trains.
        runtime: of the stage; says whether to record a trace, and how many steps a chunk has.
        is_live: whether the curves are those of the training; else they are means over members, known in the end.
    """

    def __init__(self, run: TrackedRun, engine: Engine, runtime: RuntimeConfig, *, is_live: bool):
        self._is_live = is_live
        self._run = run
        self._steps_per_epoch = engine.steps_per_epoch
        self._planned_steps = engine.num_steps
        # The first chunk is warm-up, unless it is the only one.
        is_one_chunk = engine.num_steps <= min(engine.steps_per_epoch, runtime.steps_per_call)
        self._trace = StepTrace(run, chunk=0 if not runtime.trace else 1 if is_one_chunk else 2)

    def __enter__(self) -> Self:
        self._trace.__enter__()
        return self

    def __exit__(self, *fault: object) -> None:
        self._trace.__exit__(*fault)

    def after_chunk(self, state: TrainState) -> None:
        """Let the trace begin and end with its chunk."""
        with self._run.best_effort():
            self._trace.after_chunk(state)

    def after_epoch(self, history: History, seconds: float) -> None:
        """Log the points that the last epoch adds to the curves."""
        if not self._is_live:
            return
        with self._run.best_effort():
            points = live_curves(history, self._planned_steps)
            self._run.curves({**points, "train/elapsed_seconds": {history.epochs[-1].epoch: seconds}})

    def diverged(self, chunk: Chunk) -> None:
        """Log the steps of the epoch in which the training diverged."""
        with self._run.best_effort():
            self._run.curves(curves_of_steps(chunk, self._steps_per_epoch, self._planned_steps))


def live_curves(history: History, planned_steps: int) -> Curves:
    """Return the part of a training's curves that its last epoch adds."""
    steps_before = sum(len(part.loss) for part in history.steps[:-1])
    return curves(epoch_table(history.epochs[-1:]), step_table(history.steps[-1:], before=steps_before), planned_steps)


def curves_of_steps(chunk: Chunk, steps_per_epoch: int, planned_steps: int) -> Curves:
    """Return the curves of the steps done in an unfinished epoch."""
    before = (chunk.epoch - 1) * steps_per_epoch
    steps = step_table([jax.device_get(chunk.records)], before=before)
    return curves(epoch_table([]), steps[steps["step"] <= chunk.step], planned_steps)


class StepTrace:
    """Records one chunk of a training with JAX's profiler and logs the files under `trace/`; a context manager.

    `tensorboard --logdir` reads the folder, and Perfetto the `perfetto_trace.json.gz` in it. The profiler is stopped
    with the block at the latest; of a training that fails nothing is logged.

    Args:
        run: of the training.
        chunk: which one, from 1; 0 for none.
    """

    def __init__(self, run: TrackedRun, *, chunk: int):
        self._run = run
        self._before = chunk - 1  # chunks yet to come before the one to record
        self._folder = tempfile.TemporaryDirectory()
        self._is_recording = False

    def __enter__(self) -> Self:
        if self._before == 0:
            self._start()
        return self

    def after_chunk(self, state: object) -> None:
        """Start before the chunk, stop after it; `state` is what it computes."""
        if self._before < 0:
            return
        jax.block_until_ready(state)
        self._before -= 1
        if self._before == 0:
            self._start()
        elif self._before < 0:
            self._stop()
            self._run.files(Path(self._folder.name), "trace")

    def __exit__(self, *_: object) -> None:
        if self._is_recording:
            self._stop()
        self._folder.cleanup()

    def _start(self) -> None:
        jax.profiler.start_trace(self._folder.name, create_perfetto_trace=True)
        self._is_recording = True

    def _stop(self) -> None:
        self._is_recording = False
        jax.profiler.stop_trace()
