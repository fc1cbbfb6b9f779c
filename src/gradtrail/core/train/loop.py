"""Training as a compiled program: shuffling, batching and optimizer steps run on the device.

`train` is a generator of the records of the steps done. Files, logs and checkpoints are out of scope.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, UInt8

from gradtrail.core import batching
from gradtrail.core.config import LARGEST, ConfigError
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.sharding import make_mesh, over_batch, put, replicated, with_sharding
from gradtrail.core.train import feed, stepping
from gradtrail.core.train.batch_gradient import Examples
from gradtrail.core.train.config import VARIED, TrainConfig
from gradtrail.core.train.feed import Block, Source
from gradtrail.core.train.keys import keys_from_bits
from gradtrail.core.train.private import Mechanism, poisson_batches, refuse_overflow
from gradtrail.core.train.step import (
    RunKeys,
    Step,
    StepRecord,
    TrainState,
    empty_records,
    make_init,
    make_step,
    params_to_evaluate,
)
from gradtrail.core.train.stepping import Put, StepAt
from gradtrail.core.xla.compiler import NO_TIMES, CompiledFunction, Compiler
from gradtrail.core.xla.static_costs import NO_COST


def on_device(
    images: UInt8[np.ndarray, "examples height width"], labels: Int[np.ndarray, " examples"], mesh: Mesh
) -> Examples:
    """Copy a split, uint8 pixels and int32 labels, to every device of `mesh`."""
    placed = put((images, labels), replicated(mesh))
    return Examples(images=placed[0], labels=placed[1])


@dataclass(frozen=True, kw_only=True)
class Program:
    """The functions of one training before compilation; see `Engine` for those not described here."""

    epochs: int
    steps_per_epoch: int
    mesh: Mesh  # the devices that each batch is split over
    init: Callable[..., TrainState]
    records: Callable[[], StepRecord]  # () → empty records of an epoch
    evaluation_params: Callable[[TrainState], Params]
    averages: bool  # True if `evaluation_params` computes an average
    num_keys: int  # number of keys that `init` takes
    order: Callable[..., Array]
    run_steps: Callable[..., tuple[TrainState, StepRecord]]
    step: Step  # function of one step, see `make_step`
    step_at: StepAt  # (state, examples, order, index) → state and record after step `index` of an epoch
    put: Put  # (records, record, index) → the records of an epoch with that of step `index`
    examples: Any  # `Examples` of abstract arrays: the training split, or a block of it
    batch_size: int  # number of examples of a step
    steps_per_block: int | None  # number of steps of a block; None if the training split is on the device
    num_sampled: int  # number of examples in the records of an epoch


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The compiled functions of one training, with the sizes of its `Program`."""

    epochs: int
    steps_per_epoch: int
    mesh: Mesh  # the devices that each batch is split over
    init: CompiledFunction  # keys → state; see `keys_of`
    # (the state's keys, epoch) → the batches of the epoch, int32 indices of shape (steps, batch); for blocks (keys,
    # epoch, index) → one window of them, see `batching.shuffled_window`
    order: CompiledFunction
    # (state, records, examples, order, start, stop) → state and records after the steps in [start, stop); `order` and
    # `examples` as in a `Block`. Donates state and records.
    run_steps: CompiledFunction
    # state → the parameters to evaluate and to keep; valid as long as the state
    evaluation_params: Callable[[TrainState], Params]
    records: Callable[[], StepRecord]  # () → empty records of an epoch
    batch_size: int
    steps_per_block: int | None
    num_sampled: int

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the whole training."""
        return self.epochs * self.steps_per_epoch

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        functions = (self.init, self.order, self.run_steps, self.evaluation_params)
        return [function for function in functions if isinstance(function, CompiledFunction)]


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
        noise_multiplier: standard deviation of a private training's noise, in units of the clip norm.
        streamed: True if the examples come in blocks, see `feed`, not as a whole; changes no bit of the result.
        sampled: ascending indices of the examples in the records of an epoch; None for all.

    Raises:
        ConfigError: too few devices or examples, or too many steps; one line that names the key.
    """
    if len(devices) < config.shards:
        raise ConfigError(f"train.shards must be at most the number of devices, {len(devices)}, got {config.shards}")
    if config.batch_size > num_examples:
        raise ConfigError(
            f"train.batch_size must be at most the number of training examples, {num_examples:,}, "
            f"got {config.batch_size:,}"
        )
    mesh = make_mesh(devices[: config.shards])
    steps_per_epoch = batching.num_batches(num_examples, config.batch_size)
    num_steps = config.epochs * steps_per_epoch
    if num_steps > LARGEST:
        raise ConfigError(
            f"train.epochs {config.epochs:,} times {steps_per_epoch:,} steps, of batch_size {config.batch_size:,}, "
            f"are {num_steps:,} steps; at most {LARGEST:,} can be counted"
        )
    mechanism = None
    if config.privacy.enabled:
        if noise_multiplier is None or streamed:
            raise ValueError("a private training needs a noise multiplier, and a split on the device")
        mechanism = Mechanism.for_training(config, model, num_examples, num_steps, noise_multiplier)
    step = make_step(config, model, num_steps, mesh, mechanism)
    steps_per_block = feed.steps_in_block(config.batch_size, steps_per_epoch) if streamed else None

    def order(keys: RunKeys, epoch: Array, *window: Array) -> Array:
        key = jax.random.fold_in(keys.order, epoch)
        if streamed:
            return batching.shuffled_window(num_examples, *window, key=key)
        if mechanism is None:
            return batching.shuffled_batches(num_examples, config.batch_size, key=key)
        return poisson_batches(mechanism, config.batch_size, steps_per_epoch, key=key)

    step_at = stepping.at_index(step, config.batch_size, steps_per_block, mesh.size)
    put_record = stepping.put_all if sampled is None else stepping.put_sampled(sampled)
    num_rows = mechanism.capacity if mechanism else config.batch_size
    by_row = (steps_per_epoch, num_rows) if sampled is None else (len(sampled),)

    def examples() -> Examples:
        size = steps_per_block * config.batch_size if steps_per_block else num_examples
        images = jnp.zeros((size, *model.config.image_shape), jnp.uint8)
        return Examples(images=images, labels=jnp.zeros(size, jnp.int32))

    return Program(
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        mesh=mesh,
        init=make_init(config, model, num_steps),
        records=functools.partial(empty_records, config, steps_per_epoch, by_row),
        num_keys=len(VARIED) + config.privacy.enabled,
        evaluation_params=functools.partial(params_to_evaluate, config),
        averages=config.optimizer.averages,
        order=order,
        run_steps=functools.partial(stepping.run_steps, stepping.with_record(step_at, put_record)),
        step=step,
        step_at=step_at,
        put=put_record,
        examples=with_sharding(jax.eval_shape(examples), over_batch(mesh) if streamed else replicated(mesh)),
        batch_size=config.batch_size,
        steps_per_block=steps_per_block,
        num_sampled=num_examples if sampled is None else len(sampled),
    )


def compile_engine(program: Program, *, compiler: Compiler) -> Engine:
    """Compile the functions of a training."""
    everywhere = replicated(program.mesh)
    keys, index, state = _abstract_arguments(program)
    compile_here = functools.partial(compiler.compile, out_shardings=everywhere)
    evaluation_params: Callable[[TrainState], Params] = program.evaluation_params
    if program.averages:
        evaluation_params = compile_here("evaluation_params", evaluation_params, state)
    return Engine(
        epochs=program.epochs,
        steps_per_epoch=program.steps_per_epoch,
        mesh=program.mesh,
        init=compile_here("init", program.init, keys),
        order=compile_here(
            "order", program.order, state.keys, *[index] * (1 if program.steps_per_block is None else 2)
        ),
        run_steps=compile_run_steps(program, compiler=compiler),
        evaluation_params=evaluation_params,
        records=lambda: put(program.records(), everywhere),
        batch_size=program.batch_size,
        steps_per_block=program.steps_per_block,
        num_sampled=program.num_sampled,
    )


def compile_run_steps(program: Program, *, compiler: Compiler) -> CompiledFunction:
    """Compile the loop of optimizer steps, under the name `train_step`: its static cost is that of one step."""
    debugging: Any = jax.config  # mypy does not know its switches
    if debugging.jax_debug_nans:
        one_by_one = functools.partial(
            stepping.run_steps_one_by_one, stepping.with_record(program.step_at, program.put)
        )
        return CompiledFunction(name="train_step", call=one_by_one, cost=NO_COST, times=NO_TIMES)
    everywhere = replicated(program.mesh)
    _, index, state = _abstract_arguments(program)
    records = with_sharding(jax.eval_shape(program.records), everywhere)
    block_order = jax.ShapeDtypeStruct((program.steps_per_block or 0, program.batch_size), jnp.int32)
    order = block_order if program.steps_per_block else jax.eval_shape(program.order, state.keys, index)
    arguments = (state, records, program.examples, with_sharding(order, everywhere), index, index)
    return compiler.compile(
        "train_step",
        program.run_steps,
        *arguments,
        donate_argnums=(0, 1),
        expect_donated=(0, 1),  # else the state would take twice the memory
        out_shardings=everywhere,
        trips_of=lambda *called: int(called[-1]) - int(called[-2]),
        unread_bytes=feed.unread_bytes(program.examples, program.batch_size // program.mesh.size),
    )


def train(
    engine: Engine,
    state: TrainState,
    examples: Examples | Source,
    *,
    steps_per_call: int,
    records: StepRecord | None = None,
) -> Iterator[Chunk]:
    """Train to the end; yield a chunk after every `steps_per_call` steps and at the end of each epoch.

    Args:
        engine: functions compiled for these shapes.
        state: initial state, `engine.init(keys)` or that of an earlier chunk; its memory is reused.
        examples: the training split; a source if the engine is compiled for blocks.
        steps_per_call: number of steps per chunk, fewer at the end of a block; changes no bit of the result.
        records: records of the epoch so far if `state` is within an epoch, else None.

    Raises:
        ConfigError: a Poisson-sampled batch of the next epoch exceeds the capacity; one line.
    """
    done = int(state.step)
    while done < engine.num_steps:
        epoch, first = divmod(done, engine.steps_per_epoch)
        records = engine.records() if records is None else records
        for block in _blocks(engine, examples, state.keys, epoch, first):
            for start in range(max(first, block.first), block.stop, steps_per_call):
                stop = min(start + steps_per_call, block.stop)
                state, records = engine.run_steps(
                    state, records, block.examples, block.order, np.int32(start), np.int32(stop)
                )
                done = epoch * engine.steps_per_epoch + stop
                ends_epoch = stop == engine.steps_per_epoch
                yield Chunk(epoch=epoch + 1, ends_epoch=ends_epoch, step=done, state=state, records=records)
        records = None


def _blocks(engine: Engine, examples: Examples | Source, keys: RunKeys, epoch: int, first: int) -> Iterable[Block]:
    """Return examples and order of the steps of an epoch from `first` on."""
    if isinstance(examples, Examples):
        order = engine.order(keys, np.int32(epoch))
        if keys.noise is not None:
            refuse_overflow(order, epoch)
        return [Block(first=first, stop=engine.steps_per_epoch, examples=examples, order=order)]
    if engine.steps_per_block is None:
        raise ValueError("the training was compiled for a split on the device")
    bits = jax.tree.map(lambda key: np.array(jax.random.key_data(key)), keys)  # a copy: the steps reuse the memory
    run_keys = jax.tree.map(keys_from_bits, put(bits, replicated(engine.mesh)))
    order = batching.Order(len(examples), engine.batch_size, functools.partial(engine.order, run_keys, np.int32(epoch)))
    return feed.blocks(examples, order, engine.mesh, steps_per_block=engine.steps_per_block, first=first)


def abstract_state(program: Program) -> TrainState:
    """Return the shapes and dtypes of a state."""
    state: TrainState = jax.eval_shape(program.init, _abstract_keys(program))
    return state


def _abstract_arguments(program: Program) -> tuple[Any, Any, Any]:
    """Return abstract keys, index and state, replicated on the program's devices."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return with_sharding((_abstract_keys(program), index, abstract_state(program)), replicated(program.mesh))


def _abstract_keys(program: Program) -> Any:
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), program.num_keys))
