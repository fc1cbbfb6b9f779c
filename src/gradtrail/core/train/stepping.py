"""Consecutive steps of an epoch: fused into one device loop, or step by step for `jax.debug_nans`."""

import dataclasses
from collections.abc import Callable
from typing import SupportsIndex, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from gradtrail.core.train.batch_gradient import Examples
from gradtrail.core.train.feed import positions
from gradtrail.core.train.step import Step, StepRecord, TrainState

_Tree = TypeVar("_Tree")

StepAt: TypeAlias = Callable[[TrainState, Examples, Array, Array], tuple[TrainState, StepRecord]]
Put: TypeAlias = Callable[[StepRecord, StepRecord, Array], StepRecord]
RecordedStepAt: TypeAlias = Callable[[TrainState, StepRecord, Examples, Array, Array], tuple[TrainState, StepRecord]]


def at_index(step: Step, batch_size: int, steps_per_block: int | None, num_shards: int) -> StepAt:
    """Return a function that makes the step `index` of an epoch, with examples and order as in a `Block`."""
    if steps_per_block is None:
        return lambda state, examples, order, index: step(state, examples, order[index])

    def step_at(state: TrainState, examples: Examples, order: Array, index: Array) -> tuple[TrainState, StepRecord]:
        batch = order[index % steps_per_block]
        return step(state, examples, batch, positions(index, batch_size, steps_per_block, num_shards))

    return step_at


def put_all(records: StepRecord, record: StepRecord, index: Int[Array, ""]) -> StepRecord:
    """Put the record of the step `index` into those of an epoch."""
    return _put(records, record, index)


def put_sampled(sampled: Int[np.ndarray, " sampled"]) -> Put:
    """Return a `put_all` that records the rows of the sampled examples only, see `loop.make_program`."""

    def put(records: StepRecord, record: StepRecord, index: Int[Array, ""]) -> StepRecord:
        if record.rows is None:
            raise ValueError("a step records its rows")
        place = _places(record.rows.indices, jnp.asarray(sampled, jnp.int32))
        rows = _put(records.rows, dataclasses.replace(record.rows, indices=place), place)
        updated = put_all(dataclasses.replace(records, rows=None), dataclasses.replace(record, rows=None), index)
        return dataclasses.replace(updated, rows=rows)

    return put


def with_record(step_at: StepAt, put: Put) -> RecordedStepAt:
    """Return a function that makes the step `index` of an epoch and puts its record into those of the epoch."""

    def recorded_step_at(
        state: TrainState, records: StepRecord, examples: Examples, order: Array, index: Array
    ) -> tuple[TrainState, StepRecord]:
        state, record = step_at(state, examples, order, index)
        return state, put(records, record, index)

    return recorded_step_at


def _put(columns: _Tree, values: _Tree, index: Int[Array, "..."]) -> _Tree:
    """Put values into each column at `index`; values with an index out of bounds are dropped."""
    return jax.tree.map(lambda column, value: column.at[index].set(value), columns, values)


def _places(indices: Int[Array, " batch"], sampled: Int[Array, " sampled"]) -> Int[Array, " batch"]:
    """Return the place of each example among the sampled ones, or their number if it is not sampled."""
    place = jnp.searchsorted(sampled, indices, method="scan_unrolled").astype(jnp.int32)
    is_sampled = sampled[jnp.minimum(place, len(sampled) - 1)] == indices
    return jnp.where(is_sampled, place, len(sampled))


def run_steps(
    step_at: RecordedStepAt,
    state: TrainState,
    records: StepRecord,
    examples: Examples,
    order: Int[Array, "steps batch"],
    start: Int[Array, ""],
    stop: Int[Array, ""],
) -> tuple[TrainState, StepRecord]:
    """Make the steps of an epoch in [start, stop) in one loop on the device.

    The bounds are arguments of the compiled program, so one program serves all chunks, and the size of the chunks does
    not change a bit of the result.
    """

    def body(index: Array, carry: tuple[TrainState, StepRecord]) -> tuple[TrainState, StepRecord]:
        state, records = carry
        return step_at(state, records, examples, order, index)

    return jax.lax.fori_loop(start, stop, body, (state, records))


def run_steps_one_by_one(
    step_at: RecordedStepAt,
    state: TrainState,
    records: StepRecord,
    examples: Examples,
    order: Int[Array, "steps batch"],
    start: SupportsIndex,
    stop: SupportsIndex,
) -> tuple[TrainState, StepRecord]:
    """Make the same steps from Python, for `jax.debug_nans`, which locates an operation in a step but not in a loop."""
    step_at = jax.jit(step_at)
    for index in range(start, stop):
        state, records = step_at(state, records, examples, order, index)
    return state, records
