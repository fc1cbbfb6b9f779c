"""Run the training of a network to its end, from the beginning or from the last checkpoint of an interrupted one."""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gradtrail.core.data import Split
from gradtrail.core.nn.models import HostParams
from gradtrail.core.train import loop
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.feed import Source
from gradtrail.core.train.history import History, on_host
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import Chunk, Program
from gradtrail.core.train.step import StepRecord, TrainState
from gradtrail.stages.common.processes import agreed, wait_for_all
from gradtrail.stages.train.checkpoints import Checkpoints, on_devices, state_on_device
from gradtrail.support.progress import progress_bar
from gradtrail.support.signals import Stopped, stop_request


class Listener(Protocol):
    """Called while a training runs; cannot change it."""

    def after_chunk(self, state: TrainState) -> None:
        """Receive the state after a chunk of steps; its arrays may still be being computed."""

    def after_epoch(self, history: History, seconds: float) -> None:
        """Receive the history, whose last epoch has just ended, and the seconds of training until then."""

    def diverged(self, chunk: Chunk) -> None:
        """Receive the steps of the epoch in which the training diverged."""


class NullListener:
    """A listener that logs nothing."""

    def after_chunk(self, state: TrainState) -> None:
        """Do nothing."""

    def after_epoch(self, history: History, seconds: float) -> None:
        """Do nothing."""

    def diverged(self, chunk: Chunk) -> None:
        """Do nothing."""


_Exchange = Callable[[TrainState], TrainState]


@dataclass(frozen=True, kw_only=True)
class Member:
    """A network to train, of several that differ in their seeds, or the only one.

    Attributes:
        secret: secret behind batches and noise of a private training; None for the seed. No checkpoint has it, nor the
            keys made of it.
        is_kept: True if a last checkpoint stays when the training is complete, for a training with other members.
    """

    seeds: MemberSeeds  # seeds of its random numbers
    checkpoints: Checkpoints  # checkpoints of its training
    name: str = ""  # name in messages; empty for a single member
    is_kept: bool = False
    inputs_changed: Callable[[], bool] = lambda: False
    secret: str | None = field(default=None, repr=False)
    epsilons: Sequence[float] = ()  # epsilon of a private training after each epoch, for messages


@dataclass(frozen=True, kw_only=True)
class Members:
    """What the members of a training have in common; see `Member`.

    Attributes:
        checkpoints: function that returns the exclusive checkpoints of a member.
    """

    checkpoints: Callable[[MemberSeeds], AbstractContextManager[Checkpoints]]
    secret: str | None = field(default=None, repr=False)
    epsilons: Sequence[float] = ()
    inputs_changed: Callable[[], bool] = lambda: False  # True if the results will not be recorded


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a training."""

    state: TrainState
    history: History
    seconds: float  # time of the loop, summed over all processes that ran it
    planned_steps: int  # steps of all epochs of the config; early stopping may skip some
    epsilons: Sequence[float] = ()  # epsilon of a private training after each epoch of the config; else empty


def train_members(
    engine: Program,
    validate: Callable[[HostParams], dict[str, float]],
    train: Split | Source,
    config: TrainConfig,
    *,
    members: Members,
    listener: Listener,
    steps_per_call: int,
) -> Iterator[tuple[int, TrainResult]]:
    """Train the members one after the other; yield the seed and the result of each.

    Arguments and errors are those of `run`.
    """
    several = config.members > 1
    wait_for_all()
    for seed in config.seeds:
        seeds = config.seeds_of(seed)
        with members.checkpoints(seeds) as folder:
            member = Member(
                seeds=seeds,
                checkpoints=folder,
                name=f"seed {seed}" if several else "",
                is_kept=several,
                secret=members.secret,
                epsilons=members.epsilons,
                inputs_changed=members.inputs_changed,
            )
            options: Any = {"member": member, "listener": listener, "steps_per_call": steps_per_call}
            # Not bound to a name: else this result would be in memory while the next member is trained
            yield seed, run(engine, validate, train, config, **options)


def run(
    engine: Program,
    validate: Callable[[HostParams], dict[str, float]],
    train: Split | Source,
    config: TrainConfig,
    *,
    member: Member,
    listener: Listener,
    steps_per_call: int,
) -> TrainResult:
    """Train to the end; a member that was trained to its end before is read from its checkpoint.

    Args:
        engine: compiled for examples in blocks where `train` is a source.
        validate: params → `loss` and `accuracy` on the validation split.
        steps_per_call: steps in a chunk; changes no bit of the result.

    Raises:
        FloatingPointError: the training diverged; one line.
        Stopped: the process was asked to stop; a checkpoint was written.
    """
    examples = loop.on_device(train.images, train.labels, engine.mesh) if isinstance(train, Split) else train
    state, checkpoints = engine.init(keys_of(member.seeds, member.secret)), member.checkpoints
    without_secret, with_secret = _exchange_keys(engine, member, state)
    params, num_sampled = on_host(state.params), engine.num_sampled
    history = History(config.keep_epochs, params, precision=config.precision, num_sampled=num_sampled)
    restored, records, seconds_before = _restore(checkpoints, engine, state, history)
    state = state if restored is None else with_secret(restored)
    first = int(state.step)
    started = time.perf_counter()

    def seconds() -> float:
        return seconds_before + time.perf_counter() - started

    def is_over(step: int) -> bool:
        return step == engine.num_steps or (step % engine.steps_per_epoch == 0 and history.has_stalled(config.patience))

    title = f"train {member.name}".strip()
    over = restored is not None and is_over(first)
    if restored is not None:
        how = "trained before" if over else f"resuming after step {first:,}"
        print(f"{title}: {how}, from a checkpoint", file=sys.stderr)
    wait_for_all()
    with (
        progress_bar(title, engine.num_steps, unit="steps") as bar,
        stop_request() as request,
    ):
        rest = loop.train(engine, state, examples, steps_per_call=steps_per_call, records=records)
        for chunk in () if over else rest:
            state = chunk.state
            listener.after_chunk(state)
            try:
                history.check(chunk)
            except FloatingPointError:
                listener.diverged(chunk)
                raise
            if chunk.ends_epoch:
                params = on_host(engine.evaluation_params(state))
                history.add(chunk, params, validate(params))
                listener.after_epoch(history, seconds())
            line = _describe(history, member.epsilons)
            bar.update(chunk.step, message=line)
            if chunk.ends_epoch:
                bar.log(f"{title}: {line} ({chunk.epoch}/{engine.config.epochs}, {seconds():.1f} s)")
            parts = functools.partial(_parts, without_secret(state), chunk, history, seconds())
            if (stop := agreed(lambda: request.number)) is not None:
                checkpoints.save(chunk.step, parts)
                agreed(lambda: None)  # the other processes end when it is written
                how = f"stopped after step {chunk.step:,} of {engine.num_steps:,}; `dvc repro` resumes from there"
                raise Stopped(how, stop)
            if is_over(chunk.step):
                _end(member, chunk.step, parts)
                break
            checkpoints.save_if_due(chunk.step, parts)
    return TrainResult(
        state=without_secret(state),
        history=history,
        seconds=seconds(),
        planned_steps=engine.num_steps,
        epsilons=member.epsilons,
    )


def _restore(
    checkpoints: Checkpoints, engine: Program, like: TrainState, history: History
) -> tuple[TrainState | None, StepRecord | None, float]:
    """Fill the history from the last checkpoint; return state, records of an unfinished epoch, and seconds."""
    parts = checkpoints.restore({"state": like, "records": engine.records()})
    if parts is None:
        return None, None, 0.0
    history.restore(parts["history"])
    records = parts["records"] and on_devices(parts["records"], engine.records())
    return state_on_device(parts["state"], like), records, float(parts["history"]["seconds"])


def _end(member: Member, step: int, parts: Callable[[], dict[str, Any]]) -> None:
    if member.is_kept:
        member.checkpoints.keep(step, parts)
    elif member.inputs_changed():
        member.checkpoints.save(step, parts)


def _parts(state: TrainState, chunk: Chunk, history: History, seconds: float) -> dict[str, Any]:
    """Return the parts of a checkpoint; the records are those of an unfinished epoch."""
    records = {} if chunk.ends_epoch else {"records": chunk.records}
    return {"state": state, "history": history.as_arrays() | {"seconds": np.array(seconds)}} | records


def _exchange_keys(engine: Program, member: Member, state: TrainState) -> tuple[_Exchange, _Exchange]:
    """Return functions that replace the keys of a secret by those of the seeds, for a checkpoint, and back.

    No step changes the keys. With the keys of the secret one could remove the noise. `state` is the first state, with
    the secret's keys.
    """
    if member.secret is None:
        return lambda state: state, lambda state: state
    public = engine.init(keys_of(member.seeds)).keys
    keys = state.keys  # of the first state, which is replaced before a step reuses its memory
    return lambda state: dataclasses.replace(state, keys=public), lambda state: dataclasses.replace(state, keys=keys)


def _describe(history: History, epsilons: Sequence[float]) -> str:
    """Return the line of progress: the last epoch, and what a private training has spent until its end."""
    if not (epsilons and (done := len(history.epochs))):
        return history.describe()
    return f"{history.describe()} · epsilon {epsilons[done - 1]:.3g}"
