"""Run the training of a network to its end, from the beginning or from the last checkpoint of an interrupted one."""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from gradtrail.core.common.split import Split
from gradtrail.core.nn.models import HostParams
from gradtrail.core.train import loop
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.history import History, on_host
from gradtrail.core.train.loop import Chunk, Engine
from gradtrail.core.train.step import TrainState
from gradtrail.stages.train.checkpointing import ResumeFolder
from gradtrail.support.progress import progress_bar
from gradtrail.support.signals import stop_request


class Listener(Protocol):
    """Called while a training runs; cannot change it."""

    def after_chunk(self, state: TrainState) -> None:
        """Receive the state after a chunk of steps; its arrays may still be being computed."""

    def after_epoch(self, history: History, seconds: float) -> None:
        """Receive the history, whose last epoch has just ended, and the seconds of training until then."""

    def diverged(self, chunk: Chunk) -> None:
        """Receive the steps of the epoch in which the training diverged."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A network to train, of several that differ in their seeds, or the only one.

    Attributes:
        seeds: of its random numbers.
        checkpoints: of its training.
        name: in messages; empty where it is the only one.
        is_kept: whether a last checkpoint stays when the training is complete, for a training with other members.
    """

    seeds: MemberSeeds
    checkpoints: ResumeFolder
    name: str = ""
    is_kept: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a training.

    Attributes:
        seconds: of the loop, summed over all processes that ran it.
        planned_steps: of all epochs of the config; early stopping may skip some.
    """

    state: TrainState
    history: History
    seconds: float
    planned_steps: int


def train_members(
    engine: Engine,
    validate: Callable[[HostParams], dict[str, float]],
    train: Split,
    config: TrainConfig,
    *,
    checkpoints: Callable[[MemberSeeds], AbstractContextManager[ResumeFolder]],
    listener: Listener,
    steps_per_call: int,
) -> Iterator[tuple[int, TrainResult]]:
    """Train the members one after the other, all with one compiled program; yield the seed and the result of each.

    Args:
        checkpoints: returns those of a member, which no other process uses meanwhile.

    See `run` for the other arguments and the errors.
    """
    several = config.members > 1
    for seed in config.seeds:
        seeds = config.seeds_of(seed)
        with checkpoints(seeds) as folder:
            name = f"seed {seed}" if several else ""
            member = Member(name=name, seeds=seeds, checkpoints=folder, is_kept=several)
            yield (
                seed,
                run(engine, validate, train, config, member=member, listener=listener, steps_per_call=steps_per_call),
            )


def run(
    engine: Engine,
    validate: Callable[[HostParams], dict[str, float]],
    train: Split,
    config: TrainConfig,
    *,
    member: Member,
    listener: Listener,
    steps_per_call: int,
) -> TrainResult:
    """Train to the end; a member that was trained to its end before is read from its checkpoint.

    Args:
        validate: params → `loss` and `accuracy` on the validation split.
        steps_per_call: steps in a chunk; changes no bit of the result.

    Raises:
        FloatingPointError: the training diverged; one line.
        Stopped: the process was asked to stop; a checkpoint was written.
    """
    examples = loop.on_device(train.images, train.labels, engine.mesh)
    state, checkpoints = engine.init(loop.keys_of(member.seeds)), member.checkpoints
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

    title = f"train {member.name}".strip()
    over = before is not None and is_over(before.step)
    if before is not None:
        how = "trained before" if over else f"resuming after step {before.step:,}"
        print(f"{title}: {how}, from a checkpoint", file=sys.stderr)
    with progress_bar(title, engine.num_steps, unit="steps") as bar, stop_request() as request:
        rest = loop.train(engine, state, examples, steps_per_call=steps_per_call, records=records)
        for chunk in () if over else rest:
            state = chunk.state
            listener.after_chunk(state)
            _check(history, chunk, listener)
            if chunk.ends_epoch:
                params = on_host(engine.evaluation_params(state))
                history.add(chunk, params, validate(params))
                listener.after_epoch(history, seconds())
            bar.update(chunk.step, message=history.describe())
            if chunk.ends_epoch:
                bar.log(f"{title}: {history.describe()} ({chunk.epoch}/{engine.epochs}, {seconds():.1f} s)")
            if request.number is not None:
                checkpoints.save(chunk, history, seconds())
            request.obey(f"stopped after step {chunk.step:,} of {engine.num_steps:,}; `dvc repro` resumes from there")
            if is_over(chunk.step):
                if member.is_kept:
                    checkpoints.keep(chunk, history, seconds())
                break
            checkpoints.tick(chunk, history, seconds())
    return TrainResult(state=state, history=history, seconds=seconds(), planned_steps=engine.num_steps)


def _check(history: History, chunk: Chunk, listener: Listener) -> None:
    """Call the listener and raise FloatingPointError if the training diverged."""
    try:
        history.check(chunk)
    except FloatingPointError:
        listener.diverged(chunk)
        raise
