"""Consecutive steps of an epoch: one loop on the device, or one call after the other to find a fault."""

from collections.abc import Callable
from typing import SupportsIndex, TypeAlias

import jax
from jaxtyping import Array, Int

from gradtrail.core.train.batch_gradient import Examples
from gradtrail.core.train.feed import positions
from gradtrail.core.train.step import Step, StepRecord, TrainState

StepAt: TypeAlias = Callable[[TrainState, Examples, Array, Array], tuple[TrainState, StepRecord]]


def at_split(step: Step) -> StepAt:
    """Return the step `index` of an epoch, with the training split as the examples."""
    return lambda state, examples, order, index: step(state, examples, order[index])


def at_block(step: Step, batch_size: int, steps_per_block: int, num_shards: int) -> StepAt:
    """Return the step `index` of an epoch, with the examples of its block."""

    def step_at(state: TrainState, examples: Examples, order: Array, index: Array) -> tuple[TrainState, StepRecord]:
        return step(state, examples, order[index], positions(index, batch_size, steps_per_block, num_shards))

    return step_at


def run_steps(
    step_at: StepAt,
    state: TrainState,
    records: StepRecord,
    examples: Examples,
    order: Int[Array, "*members steps batch"],
    start: Int[Array, ""],
    stop: Int[Array, ""],
) -> tuple[TrainState, StepRecord]:
    """Make the steps of an epoch in [start, stop) in one loop on the device.

    The bounds are arguments of the compiled program, so one program serves all chunks, and the size of the chunks does
    not change a bit of the result.
    """

    def body(index: Array, carry: tuple[TrainState, StepRecord]) -> tuple[TrainState, StepRecord]:
        state, records = carry
        state, record = step_at(state, examples, order, index)
        return state, jax.tree.map(lambda column, value: column.at[index].set(value), records, record)

    return jax.lax.fori_loop(start, stop, body, (state, records))


def run_steps_one_by_one(
    step_at: StepAt,
    state: TrainState,
    records: StepRecord,
    examples: Examples,
    order: Int[Array, "*members steps batch"],
    start: SupportsIndex,
    stop: SupportsIndex,
) -> tuple[TrainState, StepRecord]:
    """Make the same steps from Python, for `jax.debug_nans`, which finds the operation in a step, but not in a loop."""
    step_at = jax.jit(step_at)
    for index in range(start, stop):
        state, record = step_at(state, examples, order, index)
        records = jax.tree.map(lambda column, value: column.at[index].set(value), records, record)  # noqa: B023
    return state, records
