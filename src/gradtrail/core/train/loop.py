"""Training as a compiled program: shuffling, batching and optimizer steps run on the device.

`make_program` returns the functions of a training, `Program.compile` compiles them, and `train` is a generator of the
records of the steps done. Files, logs and checkpoints are out of scope.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt8

from gradtrail.core import batching
from gradtrail.core.config import LARGEST, ConfigError
from gradtrail.core.data import Split
from gradtrail.core.nn.models import Model
from gradtrail.core.sharding import make_mesh, put, replicated, with_sharding
from gradtrail.core.train import feed
from gradtrail.core.train.config import VARIED, TrainConfig
from gradtrail.core.train.dp_sgd import Mechanism, poisson_batches
from gradtrail.core.train.feed import Block
from gradtrail.core.train.gradient import Batch, Examples
from gradtrail.core.train.keys import keys_from_bits
from gradtrail.core.train.step import (
    RunKeys,
    StepRecord,
    TrainState,
    empty_records,
    make_init,
    make_step,
    take,
)
from gradtrail.core.xla.compiler import NO_COST, NO_TIMES, CompiledFunction, Compiler


@dataclass(frozen=True, kw_only=True)
class Program:
    """The functions of one training, and their sizes. `compile` replaces the first three by compiled ones."""

    init: Callable[..., TrainState]  # keys → state; see `keys.keys_of`
    # (the state's keys, epoch) → the batches of the epoch, int32 indices of shape (steps, batch); for blocks (keys,
    # epoch, index) → one window of them, see `batching.shuffled_window`
    order: Callable[..., Array]
    # (state, records, examples, order, start, stop) → state and records after the steps in [start, stop); `order` and
    # `examples` as in a `Block`. Compiled it donates state and records.
    run_steps: Callable[..., tuple[TrainState, StepRecord]]
    # (state, records, examples, order, index) → state and records after the step `index` of an epoch
    recorded_step: Callable[..., tuple[TrainState, StepRecord]]
    empty_records: Callable[[], StepRecord]  # () → empty records of an epoch, on the host
    config: TrainConfig
    mesh: Mesh  # the devices that each batch is split over
    steps_per_epoch: int
    num_rows: int  # rows of a step's batch: the batch size, or the capacity of a private training
    steps_per_block: int | None  # number of steps of a block; None if the training split is on the device
    abstract_keys: Any  # shapes and dtypes of the argument of `init`
    abstract_state: TrainState  # shapes and dtypes of a state
    examples: Any  # `Examples` of abstract arrays: the training split, or a block of it
    num_sampled: int  # number of examples in the records of an epoch

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the whole training."""
        return self.config.epochs * self.steps_per_epoch

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        functions: tuple[Any, ...] = (self.init, self.order, self.run_steps)
        return [function for function in functions if isinstance(function, CompiledFunction)]

    @property
    def argument_bytes(self) -> int:
        """Bytes of state, records and examples of the compiled program."""
        return next(function.cost.argument_bytes for function in self.functions if function.name == "train_step")

    def records(self) -> StepRecord:
        """Return empty records of an epoch on the devices."""
        records: StepRecord = put(self.empty_records(), replicated(self.mesh))
        return records

    def with_weight_changes(self, num_classes: int) -> "Program":
        """Return the program, which is not compiled yet, for a training split with `weight_changes`."""
        shape = (*self.examples.labels.shape, num_classes)
        changes = self._everywhere(jax.ShapeDtypeStruct(shape, jnp.float32))
        return dataclasses.replace(self, examples=dataclasses.replace(self.examples, weight_changes=changes))

    def compile(self, compiler: Compiler) -> "Program":
        """Return the program with its functions compiled."""
        keys, state, index = self.abstract_keys, self.abstract_state, self._everywhere(_INDEX)
        compile_here = functools.partial(compiler.compile, out_shardings=replicated(self.mesh))
        order = self.order
        if not self.config.privacy.enabled:  # else it draws on the host
            order = compile_here("order", order, state.keys, *[index] * (2 if self.steps_per_block else 1))
        return dataclasses.replace(
            self,
            init=compile_here("init", self.init, keys),
            order=order,
            run_steps=self.compile_run_steps(compiler),
        )

    def compile_run_steps(self, compiler: Compiler) -> CompiledFunction:
        """Compile the loop of optimizer steps, under the name `train_step`: its static cost is that of one step."""
        debugging: Any = jax.config  # mypy does not know its switches
        if debugging.jax_debug_nans:  # which locates an operation in a step, but not in a loop
            one_by_one = functools.partial(_run_steps_one_by_one, jax.jit(self.recorded_step))
            return CompiledFunction(name="train_step", call=one_by_one, cost=NO_COST, times=NO_TIMES)
        state, index = self.abstract_state, self._everywhere(_INDEX)
        records = self._everywhere(jax.eval_shape(self.empty_records))
        order = jax.ShapeDtypeStruct((self.steps_per_block or self.steps_per_epoch, self.num_rows), jnp.int32)
        rows = self.config.batch_size // self.mesh.size
        return compiler.compile(
            "train_step",
            self.run_steps,
            *(state, records, self.examples, self._everywhere(order), index, index),
            donate_argnums=(0, 1),  # else the state would take twice the memory
            out_shardings=replicated(self.mesh),
            num_iterations=lambda *called: int(called[-1]) - int(called[-2]),
            unread_bytes=0 if self.steps_per_block else feed.unread_bytes(self.examples, rows),
        )

    def _everywhere(self, abstract: Any) -> Any:
        return with_sharding(abstract, replicated(self.mesh))


_INDEX = jax.ShapeDtypeStruct((), jnp.int32)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive steps of training within one epoch."""

    epoch: int  # the epoch of these steps, from 1
    ends_epoch: bool  # True if they are the last ones of the epoch
    step: int  # number of optimizer steps since the beginning
    state: TrainState  # state after these steps; valid until the next chunk is requested, which reuses its memory
    records: StepRecord  # records of the epoch so far; entries of later steps are 0


def make_program(
    config: TrainConfig,
    model: Model,
    num_examples: int,
    devices: Sequence[jax.Device],
    noise_multiplier: float | None = None,
    *,
    streamed: bool = False,
    sampled: Int[np.ndarray, " sampled"] | None = None,
) -> Program:
    """Return the functions of a training, not yet compiled.

    Args:
        num_examples: size of the training split.
        devices: `config.shards` devices or more; each batch is split over the first ones, the rest stays unused.
        noise_multiplier: standard deviation of a private training's noise, in units of the clip norm; else None.
        streamed: True if the examples come in blocks, see `feed`, not as a whole; changes no bit of the result.
        sampled: ascending indices of the examples in the records of an epoch; None for all.

    Raises:
        ConfigError: too few devices or examples, or too many steps; one line that names the key.
    """
    steps_per_epoch = batching.num_batches(num_examples, config.batch_size)
    num_steps = config.epochs * steps_per_epoch
    _check_sizes(config, num_examples, steps_per_epoch, len(devices))
    if config.privacy.enabled and (noise_multiplier is None or streamed):
        raise ValueError("a private training needs a noise multiplier, and a split on the device")
    mesh = make_mesh(devices[: config.shards])
    mechanism = None
    if noise_multiplier is not None:
        mechanism = Mechanism.for_training(config, model, num_examples, num_steps, noise_multiplier)
    step = make_step(config, model, num_steps, mesh, mechanism)
    shape = model.config.image_shape
    steps_per_block = feed.steps_in_block(config.batch_size, shape, steps_per_epoch) if streamed else None

    def batch_of(examples: Examples, order: Array, index: Array) -> Batch:
        if steps_per_block is None:
            return take(examples, order[index])
        place = index % steps_per_block
        return Batch(images=examples.images[place], labels=examples.labels[place], indices=order[place])

    def recorded_step(
        state: TrainState, records: StepRecord, examples: Examples, order: Array, index: Array
    ) -> tuple[TrainState, StepRecord]:
        state, record = step(state, batch_of(examples, order, index))
        return state, _recorded(records, record, index, sampled)

    def run_steps(
        state: TrainState, records: StepRecord, examples: Examples, order: Array, start: Array, stop: Array
    ) -> tuple[TrainState, StepRecord]:
        """Make the steps of an epoch in [start, stop) in one loop on the device.

        The bounds are arguments of the compiled program, so one program serves all chunks, and the size of the chunks
        does not change a bit of the result.
        """

        def body(index: Array, carry: tuple[TrainState, StepRecord]) -> tuple[TrainState, StepRecord]:
            return recorded_step(*carry, examples, order, index)

        return jax.lax.fori_loop(start, stop, body, (state, records))

    examples = feed.abstract_examples(num_examples, shape, config.batch_size, steps_per_block, mesh)
    init = make_init(config, model, num_steps)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), len(VARIED) + config.privacy.enabled))
    keys, state = with_sharding((keys, jax.eval_shape(init, keys)), replicated(mesh))
    num_rows = mechanism.capacity if mechanism else config.batch_size
    by_row = (steps_per_epoch, num_rows) if sampled is None else (len(sampled),)
    return Program(
        init=init,
        order=_make_order(num_examples, config.batch_size, mechanism, mesh, streamed=streamed),
        run_steps=run_steps,
        recorded_step=recorded_step,
        empty_records=functools.partial(empty_records, config, steps_per_epoch, by_row),
        config=config,
        mesh=mesh,
        steps_per_epoch=steps_per_epoch,
        num_rows=num_rows,
        steps_per_block=steps_per_block,
        abstract_keys=keys,
        abstract_state=state,
        examples=examples,
        num_sampled=num_examples if sampled is None else len(sampled),
    )


def on_device(
    images: UInt8[np.ndarray, "examples height width *channels"],
    labels: Int[np.ndarray, " examples"],
    mesh: Mesh,
    weight_changes: Float[np.ndarray, "examples classes"] | None = None,
) -> Examples:
    """Copy a split, uint8 pixels and int32 labels, to every device of `mesh`."""
    placed = put((images, labels, weight_changes), replicated(mesh))
    return Examples(images=placed[0], labels=placed[1], weight_changes=placed[2])


def train(
    program: Program,
    state: TrainState,
    examples: Examples | Split,
    *,
    steps_per_call: int,
    records: StepRecord | None = None,
) -> Iterator[Chunk]:
    """Train to the end; yield a chunk after every `steps_per_call` steps and at the end of each epoch.

    Args:
        program: functions compiled for these shapes.
        state: initial state, `program.init(keys)` or that of an earlier chunk; its memory is reused.
        examples: the training split: on the device, or on the host if the program is compiled for blocks.
        steps_per_call: number of steps per chunk, fewer at the end of a block; changes no bit of the result.
        records: records of the epoch so far if `state` is within an epoch, else None.

    Raises:
        ConfigError: a Poisson-sampled batch of the next epoch exceeds the capacity; one line.
    """
    done = int(state.step)
    while done < program.num_steps:
        epoch, first = divmod(done, program.steps_per_epoch)
        records = program.records() if records is None else records
        for block in _blocks(program, examples, state.keys, epoch, first):
            for start in range(max(first, block.first), block.stop, steps_per_call):
                stop = min(start + steps_per_call, block.stop)
                state, records = program.run_steps(
                    state, records, block.examples, block.order, np.int32(start), np.int32(stop)
                )
                done = epoch * program.steps_per_epoch + stop
                ends_epoch = stop == program.steps_per_epoch
                yield Chunk(epoch=epoch + 1, ends_epoch=ends_epoch, step=done, state=state, records=records)
        records = None


def _blocks(program: Program, examples: Examples | Split, keys: RunKeys, epoch: int, first: int) -> Iterable[Block]:
    """Return examples and order of the steps of an epoch from `first` on."""
    if isinstance(examples, Examples):
        order = program.order(keys, np.int32(epoch))
        return [Block(first=first, stop=program.steps_per_epoch, examples=examples, order=order)]
    if program.steps_per_block is None:
        raise ValueError("the training was compiled for a split on the device")
    bits = jax.tree.map(lambda key: np.array(jax.random.key_data(key)), keys)  # a copy: the steps reuse the memory
    run_keys = jax.tree.map(keys_from_bits, put(bits, replicated(program.mesh)))
    draw = functools.partial(program.order, run_keys, np.int32(epoch))
    windows = batching.Order(len(examples), program.config.batch_size, draw)
    return feed.blocks(examples, windows, program.mesh, steps_per_block=program.steps_per_block, first=first)


def _make_order(
    num_examples: int, batch_size: int, mechanism: Mechanism | None, mesh: Mesh, *, streamed: bool
) -> Callable[..., Array]:
    """Return the function that draws the batches of an epoch, or one window of them; if private, on the host."""
    if mechanism is not None:
        num_batches = batching.num_batches(num_examples, batch_size)
        draw = functools.partial(poisson_batches, mechanism, batch_size, num_batches)
        return lambda keys, epoch: put(draw(key=keys.order, epoch=int(epoch)), replicated(mesh))

    def order(keys: RunKeys, epoch: Array, *window: Array) -> Array:
        key = jax.random.fold_in(keys.order, epoch)
        if streamed:
            return batching.shuffled_window(num_examples, *window, key=key)
        return batching.shuffled_batches(num_examples, batch_size, key=key)

    return order


def _check_sizes(config: TrainConfig, num_examples: int, steps_per_epoch: int, num_devices: int) -> None:
    """Raise ConfigError for a training that these devices or examples do not allow."""
    if num_devices < config.shards:
        raise ConfigError(f"train.shards must be at most the number of devices, {num_devices}, got {config.shards}")
    if config.batch_size > num_examples:
        raise ConfigError(
            f"train.batch_size must be at most the number of training examples, {num_examples:,}, "
            f"got {config.batch_size:,}"
        )
    if (num_steps := config.epochs * steps_per_epoch) > LARGEST:
        raise ConfigError(
            f"train.epochs {config.epochs:,} times {steps_per_epoch:,} steps, of batch_size {config.batch_size:,}, "
            f"are {num_steps:,} steps; at most {LARGEST:,} can be counted"
        )


def _recorded(
    records: StepRecord, record: StepRecord, index: Array, sampled: Int[np.ndarray, " sampled"] | None
) -> StepRecord:
    """Put the record of the step `index` into those of an epoch; of the rows only those of sampled examples."""

    def put_at(columns: Any, values: Any, index: Array) -> Any:  # an index out of bounds is dropped
        return jax.tree.map(lambda column, value: column.at[index].set(value), columns, values)

    metrics = put_at(records.metrics, record.metrics, index)
    if sampled is None:
        return StepRecord(metrics=metrics, rows=put_at(records.rows, record.rows, index))
    of_sample = jnp.asarray(sampled, jnp.int32)
    place = jnp.searchsorted(of_sample, record.rows.indices, method="scan_unrolled").astype(jnp.int32)
    is_sampled = of_sample[jnp.minimum(place, len(sampled) - 1)] == record.rows.indices
    place = jnp.where(is_sampled, place, len(sampled))
    rows = dataclasses.replace(record.rows, indices=place)
    return StepRecord(metrics=metrics, rows=put_at(records.rows, rows, place))


def _run_steps_one_by_one(
    recorded_step: Callable[..., tuple[TrainState, StepRecord]],
    state: TrainState,
    records: StepRecord,
    examples: Examples,
    order: Array,
    start: SupportsIndex,
    stop: SupportsIndex,
) -> tuple[TrainState, StepRecord]:
    """Make the same steps with one call each."""
    for index in range(start, stop):
        state, records = recorded_step(state, records, examples, order, index)
    return state, records
