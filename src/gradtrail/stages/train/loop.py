"""A training from beginning to end, or from where a killed one stood."""

import functools
import time
from dataclasses import dataclass

import jax

from gradtrail.core.common.split import Split
from gradtrail.core.nn import inference
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import History, on_host
from gradtrail.core.train.loop import Chunk, Engine
from gradtrail.core.train.step import TrainState
from gradtrail.core.xla.compiler import CompiledFunction
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.train import tables
from gradtrail.stages.train.checkpointing import ResumeFolder
from gradtrail.support.progress import progress_bar
from gradtrail.support.signals import stop_request
from gradtrail.tracking.mlflow.run import Row
from gradtrail.tracking.mlflow.trace import StepTrace


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a training came to.

    Attributes:
        seconds: of the loop, over all processes that worked on it.
    """

    state: TrainState
    history: History
    seconds: float


def run(
    engine: Engine,
    predict: CompiledFunction,
    train: Split,
    validation: Split,
    config: TrainConfig,
    *,
    row: Row,
    checkpoints: ResumeFolder,
    runtime: RuntimeConfig,
) -> Finished:
    """Train to the end.

    Raises:
        FloatingPointError: the training diverged; one line.
        Stopped: somebody asked to stop; a checkpoint was written.
    """
    examples = loop.on_device(train.images, train.labels)
    state = engine.init(jax.random.key(config.seed))
    initial = on_host(state.params)
    history_of = functools.partial(History.from_arrays, config.keep_epochs, initial, precision=config.precision)
    before = checkpoints.load(state, engine.records(), history_of)
    history = before.history if before else History(config.keep_epochs, initial, precision=config.precision)
    records, seconds_before = (before.records, before.seconds) if before else (None, 0.0)
    state = before.state if before else state
    started = time.perf_counter()

    def seconds() -> float:
        return seconds_before + time.perf_counter() - started

    def is_over(step: int) -> bool:
        return step == engine.num_steps or (step % engine.steps_per_epoch == 0 and history.has_stalled(config.patience))

    trace = StepTrace(row, wanted=runtime.trace)
    with progress_bar("train", engine.num_steps, unit="steps") as bar, stop_request() as request:
        over = before is not None and is_over(before.step)
        rest = loop.train(engine, state, examples, steps_per_call=runtime.steps_per_call, records=records)
        for chunk in () if over else rest:
            state = chunk.state
            trace.after_chunk(state)
            _check(history, chunk, engine, row)
            if chunk.ends_epoch:
                params = on_host(engine.evaluation_params(state))
                history.add(chunk, params, inference.validate(predict, params, validation.images, validation.labels))
                row.curves(tables.live_curves(history, engine.num_steps))
                row.curves({"train/elapsed_seconds": {chunk.epoch: seconds()}})
            bar.update(chunk.step, message=history.describe())
            if request.number is not None:
                checkpoints.save(chunk, history, seconds())
            request.obey(f"stopped after step {chunk.step:,} of {engine.num_steps:,}; `dvc repro` goes on from there")
            if is_over(chunk.step):
                break
            checkpoints.tick(chunk, history, seconds())
    return Finished(state=state, history=history, seconds=seconds())


def _check(history: History, chunk: Chunk, engine: Engine, row: Row) -> None:
    """Raise FloatingPointError if the training diverged, and leave what was recorded until then in its row."""
    try:
        history.check(chunk)
    except FloatingPointError:
        row.curves(tables.curves_of_steps(chunk, engine.steps_per_epoch, engine.num_steps))
        raise
