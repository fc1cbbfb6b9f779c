"""Training as compiled programs: shuffling, batching, optimizer steps and validation run on the device.

`TrainingFunctions` are the pure functions of a training. Compiled they are a `CompiledTraining`, whose `train` is a
generator of the records of the steps done. Files, logs and checkpoints are out of scope.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt8

from gradtrail.core import batching
from gradtrail.core.config import LARGEST, ConfigError
from gradtrail.core.data import Split
from gradtrail.core.nn.inference import VALIDATION_BATCH_SIZE, predict_batch
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.sharding import data_parallel, make_mesh, put, replicated, with_sharding
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
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.core.xla.passes import Pass, compile_within


class TrainingFunctions:
    """The pure functions of a training, and the shapes of their arguments.

    Args:
        num_examples: size of the training split.
        devices: `config.shards` devices or more; each batch is split over the first ones, the rest stays unused.
        noise_multiplier: standard deviation of a private training's noise, in units of the clip norm; else None.
        streamed: True if the examples come in blocks, see `feed`, not as a whole; changes no bit of the result.
        sampled: ascending indices of the examples in the records of an epoch; None for all.

    Raises:
        ConfigError: too few devices, too many steps, or an augmentation that does not suit the images; one line that
            names the key.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Model,
        num_examples: int,
        devices: Sequence[jax.Device],
        noise_multiplier: float | None = None,
        *,
        streamed: bool = False,
        sampled: Int[np.ndarray, " sampled"] | None = None,
    ) -> None:
        self.steps_per_epoch = batching.num_batches(num_examples, config.batch_size)
        self.num_steps = config.epochs * self.steps_per_epoch
        if (count := len(devices)) < config.shards:
            raise ConfigError(f"train.shards must be at most the number of devices, {count}, got {config.shards}")
        if self.num_steps > LARGEST:
            raise ConfigError(
                f"train.epochs {config.epochs:,} times {self.steps_per_epoch:,} steps, of batch_size "
                f"{config.batch_size:,}, are {self.num_steps:,} steps; at most {LARGEST:,} can be counted"
            )
        config.augmentation.check_images(model.config.image_shape)
        if config.privacy.enabled and (noise_multiplier is None or streamed):
            raise ValueError("a private training needs a noise multiplier, and a split on the device")
        self.config, self.num_examples, self.streamed, self.sampled = config, num_examples, streamed, sampled
        self.mesh = make_mesh(devices[: config.shards])  # the devices that each batch is split over
        self.mechanism: Mechanism | None = None
        self.num_rows = config.batch_size  # number of rows of a step's batch
        if noise_multiplier is not None:
            self.mechanism = Mechanism.for_training(config, model, num_examples, self.num_steps, noise_multiplier)
            self.num_rows = self.mechanism.capacity
        self.init = make_init(config, model, self.num_steps)  # keys → state; see `keys.keys_of`
        self.step = make_step(config, model, self.num_steps, self.mesh, self.mechanism)

        shape, self.num_classes = model.config.image_shape, model.config.num_classes
        self.steps_per_block = self.steps_per_epoch
        if streamed:
            self.steps_per_block = feed.steps_in_block(config.batch_size, shape, self.steps_per_epoch)
        leading = (self.steps_per_block, config.batch_size) if streamed else (num_examples,)
        self.abstract_examples = feed.abstract_examples(leading, shape, self.mesh)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), len(VARIED) + config.privacy.enabled))
        self.abstract_keys, self.abstract_state = self.on_all_devices((keys, jax.eval_shape(self.init, keys)))

    def order(self, keys: RunKeys, epoch: Any, *window: Array) -> Array:
        """Return the batches of an epoch, int32 indices of shape (steps, rows); if private, drawn on the host.

        Of a streamed training, return one window of them, by its index; see `batching.shuffled_window`.
        """
        batch_size = self.config.batch_size
        if self.mechanism is not None:
            drawn = poisson_batches(self.mechanism, batch_size, self.steps_per_epoch, key=keys.order, epoch=int(epoch))
            return put(drawn, replicated(self.mesh))
        key = jax.random.fold_in(keys.order, epoch)
        if self.streamed:
            return batching.shuffled_window(self.num_examples, *window, key=key)
        return batching.shuffled_batches(self.num_examples, batch_size, key=key)

    def run_steps(
        self, state: TrainState, records: StepRecord, examples: Examples, order: Array, start: Array, stop: Array
    ) -> tuple[TrainState, StepRecord]:
        """Make the steps of an epoch in [start, stop) in one loop on the device.

        The bounds are arguments of the compiled program, so one program serves all chunks, and the size of the chunks
        does not change a bit of the result.
        """

        def body(index: Array, carry: tuple[TrainState, StepRecord]) -> tuple[TrainState, StepRecord]:
            return self.recorded_step(*carry, examples, order, index)

        return jax.lax.fori_loop(start, stop, body, (state, records))

    def recorded_step(
        self, state: TrainState, records: StepRecord, examples: Examples, order: Array, index: Array
    ) -> tuple[TrainState, StepRecord]:
        """Make the step `index` of an epoch, and put its record into those of the epoch; see `feed.Block`."""
        if self.streamed:
            place = index % self.steps_per_block
            batch = Batch(images=examples.images[place], labels=examples.labels[place], indices=order[place])
        else:
            batch = take(examples, order[index])
        state, record = self.step(state, batch)
        return state, _recorded(records, record, index, self.sampled)

    def empty_records(self) -> StepRecord:
        """Return empty records of an epoch, on the host."""
        by_row = (self.steps_per_epoch, self.num_rows) if self.sampled is None else (len(self.sampled),)
        return empty_records(self.config, self.steps_per_epoch, by_row)

    def with_weight_changes(self) -> "TrainingFunctions":
        """Return the training of a split with `weight_changes`."""
        examples, training = self.abstract_examples, copy.copy(self)
        shape = (*examples.labels.shape, self.num_classes)
        changes = self.on_all_devices(jax.ShapeDtypeStruct(shape, jnp.float32))
        training.abstract_examples = dataclasses.replace(examples, weight_changes=changes)
        return training

    def compile(self, compiler: Compiler) -> "CompiledTraining":
        """Compile all functions, except the order of a private training, which is drawn on the host."""
        return CompiledTraining(self, compiler)

    def compile_run_steps(self, compiler: Compiler) -> CompiledFunction:
        """Compile the loop of optimizer steps, under the name `train_step`: its static cost is that of one step."""
        order = jax.ShapeDtypeStruct((self.steps_per_block, self.num_rows), jnp.int32)
        records, order, index = self.on_all_devices((jax.eval_shape(self.empty_records), order, _INDEX))
        rows = self.config.batch_size // self.mesh.size
        return compiler.compile(
            "train_step",
            self.run_steps,
            *(self.abstract_state, records, self.abstract_examples, order, index, index),
            donate_argnums=(0, 1),  # else the state would take twice the memory
            out_shardings=replicated(self.mesh),
            num_iterations=lambda *called: int(np.subtract(*jax.device_get(called[:-3:-1]))),
            unread_bytes=0 if self.streamed else feed.unread_bytes(self.abstract_examples, rows),
        )

    def on_all_devices(self, abstract: Any) -> Any:
        """Return a pytree of abstract arrays that every device has completely."""
        return with_sharding(abstract, replicated(self.mesh))


_INDEX = jax.ShapeDtypeStruct((), jnp.int32)


class CompiledTraining:
    """The compiled functions of a training, and the loop that calls them."""

    def __init__(self, training: TrainingFunctions, compiler: Compiler) -> None:
        self.training, self.mesh = training, training.mesh
        self.num_steps, self.steps_per_epoch = training.num_steps, training.steps_per_epoch
        compile_here = functools.partial(compiler.compile, out_shardings=replicated(self.mesh))
        self.init = compile_here("init", training.init, training.abstract_keys)
        self.functions = [self.init]  # all compiled functions
        self.order: Callable[..., Array] = training.order
        if not training.config.privacy.enabled:  # else it draws on the host
            numbers = [training.on_all_devices(_INDEX)] * (2 if training.streamed else 1)  # of epoch and window
            self.functions.append(compile_here("order", training.order, training.abstract_state.keys, *numbers))
            self.order = self.functions[-1]
        self.run_steps = training.compile_run_steps(compiler)
        self.functions.append(self.run_steps)

    def records(self) -> StepRecord:
        """Return empty records of an epoch on the devices."""
        records: StepRecord = put(self.training.empty_records(), replicated(self.mesh))
        return records

    def train(
        self,
        state: TrainState,
        examples: Examples | Split,
        *,
        steps_per_call: int,
        records: StepRecord | None = None,
        waiting: Callable[[Iterable[Block]], Iterable[Block]] = iter,
    ) -> Iterator["Chunk"]:
        """Train to the end; yield a chunk after every `steps_per_call` steps and at the end of each epoch.

        Args:
            state: initial state, `init(keys)` or that of an earlier chunk; its memory is reused.
            examples: the training split: on the device, or on the host if it is streamed.
            steps_per_call: number of steps per chunk, fewer at the end of a block; changes no bit of the result.
            records: records of the epoch so far if `state` is within an epoch, else None.
            waiting: iterates over the blocks of examples; may time how long each of them takes to come.

        Raises:
            ConfigError: a Poisson-sampled batch of the next epoch exceeds the capacity; one line.
        """
        done = int(jax.device_get(state.step))
        while done < self.num_steps:
            epoch, first = divmod(done, self.steps_per_epoch)
            records = self.records() if records is None else records
            for block in waiting(self._blocks(examples, state.keys, epoch, first)):
                for start in range(max(first, block.first), block.stop, steps_per_call):
                    stop = min(start + steps_per_call, block.stop)
                    bounds = put((np.int32(start), np.int32(stop)), replicated(self.mesh))  # explicit transfers
                    state, records = self.run_steps(state, records, block.examples, block.order, *bounds)
                    done = epoch * self.steps_per_epoch + stop
                    ends_epoch = stop == self.steps_per_epoch
                    yield Chunk(epoch=epoch + 1, ends_epoch=ends_epoch, step=done, state=state, records=records)
            records = None

    def _blocks(self, examples: Examples | Split, keys: RunKeys, epoch: int, first: int) -> Iterable[Block]:
        """Return examples and order of the steps of an epoch from `first` on."""
        if isinstance(examples, Examples):
            order = self.order(keys, put(np.int32(epoch), replicated(self.mesh)))
            return [Block(first=first, stop=self.steps_per_epoch, examples=examples, order=order)]
        bits = jax.tree.map(lambda key: np.array(jax.random.key_data(key)), keys)  # a copy: the steps reuse the memory
        run_keys = jax.tree.map(keys_from_bits, put(bits, replicated(self.mesh)))

        def draw(window: Any) -> Array:
            return self.order(run_keys, *put((np.int32(epoch), window), replicated(self.mesh)))

        windows = batching.Order(len(examples), self.training.config.batch_size, draw)
        return feed.blocks(examples, windows, self.mesh, steps_per_block=self.training.steps_per_block, first=first)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive steps of training within one epoch."""

    epoch: int  # the epoch of these steps, from 1
    ends_epoch: bool  # True if they are the last ones of the epoch
    step: int  # number of optimizer steps since the beginning
    state: TrainState  # state after these steps; valid until the next chunk is requested, which reuses its memory
    records: StepRecord  # records of the epoch so far; entries of later steps are 0


def on_device(
    images: UInt8[np.ndarray, "examples height width *channels"],
    labels: Int[np.ndarray, " examples"],
    mesh: Mesh,
    weight_changes: Float[np.ndarray, "examples classes"] | None = None,
) -> Examples:
    """Copy a split, uint8 pixels and int32 labels, to every device of `mesh`."""
    placed = put((images, labels, weight_changes), replicated(mesh))
    return Examples(images=placed[0], labels=placed[1], weight_changes=placed[2])


def compile_validate(model: Model, num_examples: int, mesh: Mesh, *, compiler: Compiler) -> Pass:
    """Compile `score` for a split on the devices of `mesh`, in batches that fit into the budget of memory."""
    params = with_sharding(model.abstract_params(), replicated(mesh))
    examples = feed.abstract_examples((num_examples,), model.config.image_shape, mesh)

    def compile_at(largest: int) -> CompiledFunction:
        function, unread = functools.partial(score, model, mesh, largest), feed.unread_bytes(examples, largest)
        return compiler.compile("validate", function, params, examples, unread_bytes=unread, timed_calls=2)

    return compile_within(min(VALIDATION_BATCH_SIZE, num_examples), compile_at)


def score(model: Model, mesh: Mesh, largest: int, params: Params, examples: Examples) -> dict[str, Array]:
    """Return `loss` and `correct` of each example; the devices share batches of one size, at most `largest`."""
    count = len(examples.labels)
    num_batches = mesh.size * batching.num_batches(count, mesh.size * largest)
    size = batching.num_batches(count, num_batches)  # the last batches are filled up with the last example
    indices = jnp.minimum(jnp.arange(num_batches * size, dtype=jnp.int32), count - 1).reshape(num_batches, size)

    def work(whole: tuple[Params, Examples], indices: Int[Array, "batches size"]) -> tuple[None, dict[str, Array]]:
        params, examples = whole

        def score_batch(rows: Int[Array, " size"]) -> dict[str, Array]:
            scores = predict_batch(model, params, examples.images[rows], examples.labels[rows])
            return {name: scores[name] for name in ("loss", "correct")}

        return None, jax.lax.map(score_batch, indices)

    _, scores = data_parallel(work, mesh)((params, examples), indices)
    scores = jax.tree.map(lambda values: values.ravel()[:count], scores)
    return jax.lax.with_sharding_constraint(scores, replicated(mesh))


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
