"""Several networks that one program trains side by side: `vmap` over what differs among them, their seeds.

Meant for an accelerator, which one small network leaves idle for most of the time; on a CPU nothing is gained. Products
over a further axis are added up in another order, so that the last digits of a network are others than by itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Key

from gradtrail.core.train.batch_gradient import Examples
from gradtrail.core.train.config import MemberSeeds
from gradtrail.core.train.keys import key_bits_of, keys_of, wrapped
from gradtrail.core.train.loop import Chunk, Engine, Program
from gradtrail.core.train.step import StepRecord, TrainState
from gradtrail.core.train.stepping import put_all, recorded, run_steps

_STEPS, _ROUNDS = 16, 3  # of a measurement: steps of a call, and calls after the first

_Tree = TypeVar("_Tree")


def at_once(program: Program, members: int) -> Program:
    """Return the functions that train `members` networks at once.

    States and orders have a leading axis of members; records have it after that of the steps or followed examples. The
    training split is shared.
    """
    step_at = jax.vmap(program.step_at, in_axes=(0, None, 0, None))
    put = program.put if program.put is put_all else jax.vmap(program.put, in_axes=(1, 0, None), out_axes=1)

    def records() -> StepRecord:
        return jax.tree.map(lambda leaf: np.repeat(leaf[:, None], members, axis=1), program.records())

    return dataclasses.replace(
        program,
        members=members,
        init=jax.vmap(program.init),
        order=jax.vmap(program.order, in_axes=(0, None)),
        evaluation_params=jax.vmap(program.evaluation_params) if program.averages else program.evaluation_params,
        step_at=step_at,
        put=put,
        run_steps=functools.partial(run_steps, recorded(step_at, put)),
        records=records,
    )


def keys_at_once(seeds: Sequence[MemberSeeds]) -> Key[Array, "members purposes"]:
    """Return the keys of several networks; see `keys_of`."""
    return wrapped(np.stack([key_bits_of(each) for each in seeds]))


def member_of(tree: _Tree, member: int) -> _Tree:
    """Return the part of one member of a pytree on the host whose leading axis is that of the members."""
    return jax.tree.map(lambda leaf: leaf[member], tree)


def chunks_of(chunk: Chunk, members: int) -> list[Chunk]:
    """Return what a chunk is to each member; the state is that of all of them, the records are on the host."""
    records: StepRecord = jax.device_get(chunk.records)
    return [
        dataclasses.replace(chunk, records=jax.tree.map(lambda leaf: leaf[:, member], records))  # noqa: B023
        for member in range(members)
    ]


def speedup(
    together: Engine, alone: Engine, examples: Examples, seeds: Sequence[MemberSeeds], clock: Callable[[], float]
) -> float:
    """Measure how many times as fast networks are trained at once as one after the other.

    Calls of both take turns, and the medians count; no state is kept. `clock` returns seconds.
    """
    steps = min(_STEPS, alone.steps_per_epoch)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    begun: dict[bool, Any] = {
        True: _begin(together, together.init(keys_at_once(seeds))),
        False: _begin(alone, alone.init(keys_of(seeds[0]))),
    }
    for round_ in range(1 + _ROUNDS):
        for is_together, engine in ((True, together), (False, alone)):
            state, records, order = begun[is_together]
            started = clock()
            state, records = engine.run_steps(state, records, examples, order, np.int32(0), np.int32(steps))
            jax.block_until_ready(state)
            taken = clock() - started
            seconds[is_together] += [taken] if round_ else []
            begun[is_together] = state, records, order
    return float(len(seeds) * np.median(seconds[False]) / np.median(seconds[True]))


def _begin(engine: Engine, state: TrainState) -> tuple[TrainState, StepRecord, Array]:
    return state, engine.records(), engine.order(state.keys, np.int32(0))
