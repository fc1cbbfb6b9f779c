"""Training as a compiled program: shuffling, batching and stepping happen on the device; the host only collects.

A step is a pure function of a state, which is a pytree. `train` is a generator that hands out what happened; files,
logs and checkpoints are the caller's.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt8

from gradtrail.core import batches, losses
from gradtrail.core.bounds import check
from gradtrail.core.compilation import CompiledFunction, compile_function
from gradtrail.core.models import MLPConfig, Model, ModelConfig, ModelKind, Params
from gradtrail.core.optimizers import (
    AdamWConfig,
    OptimizerConfig,
    OptimizerKind,
    ScheduleKind,
    SGDConfig,
    WarmupCosineConfig,
    make_optimizer,
    make_schedule,
)
from gradtrail.core.precision import Precision


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The section `train` of `params.yaml`. Kinds stand side by side, so that one override switches each.

    Attributes:
        seed: determines the initial weights and the order of the examples.
        epochs: passes over the training split.
        batch_size: examples per optimizer step; the last batch of an epoch may be smaller.
        label_smoothing: share of the target spread over all classes.
        keep_epochs: epochs after which the weights are kept for analyses, 0 being the initial ones; those beyond
            `epochs` are never reached.
    """

    seed: int
    epochs: int
    batch_size: int
    model: ModelKind
    mlp: MLPConfig
    precision: Precision
    learning_rate: float
    optimizer: OptimizerKind
    sgd: SGDConfig
    adamw: AdamWConfig
    schedule: ScheduleKind
    warmup_cosine: WarmupCosineConfig
    clip_norm: float | None
    label_smoothing: float
    keep_epochs: tuple[int, ...]

    def __post_init__(self) -> None:
        check("seed", self.seed, at_least=0, below=2**32)
        check("epochs", self.epochs, at_least=1)
        check("batch_size", self.batch_size, at_least=1)
        check("learning_rate", self.learning_rate, above=0)
        check("label_smoothing", self.label_smoothing, at_least=0, below=1)
        if self.clip_norm is not None:
            check("clip_norm", self.clip_norm, above=0)
        for epoch in self.keep_epochs:
            check("keep_epochs", epoch, at_least=0)

    def model_config(self, image_shape: tuple[int, int], num_classes: int) -> ModelConfig:
        """Return the network for images and classes of a data set."""
        return ModelConfig(
            kind=self.model,
            mlp=self.mlp if self.model == "mlp" else None,
            precision=self.precision,
            image_shape=image_shape,
            num_classes=num_classes,
        )

    def optimizer_config(self) -> OptimizerConfig:
        """Return the part that turns gradients into updates."""
        return OptimizerConfig(
            kind=self.optimizer,
            sgd=self.sgd,
            adamw=self.adamw,
            schedule=self.schedule,
            warmup_cosine=self.warmup_cosine,
            learning_rate=self.learning_rate,
            clip_norm=self.clip_norm,
        )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state", "key"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that training carries from step to step.

    Attributes:
        step: optimizer steps done, int32.
        key: of the whole run; never consumed, only folded with the step or the epoch.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: PyTree
    key: Key[Array, ""]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss", "accuracy", "grad_norm", "learning_rate"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is recorded of a step, float32; of several steps, with a leading axis.

    Attributes:
        loss: mean over the batch, in nats, label smoothing included.
        accuracy: share of the batch, before the update.
        grad_norm: global L2 norm of the mean gradient, before clipping.
        learning_rate: of this step.
    """

    loss: Float[Array, "*steps"]
    accuracy: Float[Array, "*steps"]
    grad_norm: Float[Array, "*steps"]
    learning_rate: Float[Array, "*steps"]

    @classmethod
    def empty(cls, num_steps: int) -> "StepRecord":
        """Return records of `num_steps` steps to be filled in."""
        return cls(**{name: jnp.zeros(num_steps) for name in cls.__dataclass_fields__})


@functools.partial(jax.tree_util.register_dataclass, data_fields=["images", "labels"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class Examples:
    """A split on the device.

    Attributes:
        images: pixels, 0 to 255.
        labels: class of each, int32.
    """

    images: UInt8[Array, "examples height width"]
    labels: Int[Array, " examples"]


def on_device(images: UInt8[np.ndarray, "examples height width"], labels: Int[np.ndarray, " examples"]) -> Examples:
    """Copy a split to the default device, as it is: uint8 pixels and int32 labels."""
    return Examples(images=jnp.asarray(images), labels=jnp.asarray(labels))


Step = Callable[[TrainState, Examples, Bool[Array, " batch"]], tuple[TrainState, StepRecord]]


@dataclass(frozen=True, kw_only=True)
class Program:
    """The functions of one training, yet to be compiled; those of `Engine`.

    Attributes:
        examples: shapes and dtypes of the training split, an abstract `Examples`.
    """

    epochs: int
    steps_per_epoch: int
    init: Callable[..., TrainState]
    order: Callable[..., Array]
    run_steps: Callable[..., tuple[TrainState, StepRecord]]
    examples: Any


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The compiled functions of one training.

    Attributes:
        init: key → state.
        order: key, epoch → the epoch's batches, as indices of shape (steps, batch).
        run_steps: state, records, examples, order, start, stop → state and records after the steps in [start, stop).
            Donates state and records.
    """

    epochs: int
    steps_per_epoch: int
    init: CompiledFunction
    order: CompiledFunction
    run_steps: CompiledFunction

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.epochs * self.steps_per_epoch

    @property
    def functions(self) -> list[CompiledFunction]:
        """All of them, for the profile."""
        return [self.init, self.order, self.run_steps]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some steps of training.

    Attributes:
        epoch: the epoch these steps belong to, from 1.
        ends_epoch: whether they are its last ones.
        step: optimizer steps done since the beginning.
        state: after these steps. Valid until the next chunk is asked for: its memory is then reused.
        records: of the epoch so far; entries of steps not yet done are 0.
    """

    epoch: int
    ends_epoch: bool
    step: int
    state: TrainState
    records: StepRecord


def make_step(
    model: Model, optimizer: optax.GradientTransformation, schedule: optax.Schedule, *, label_smoothing: float
) -> Step:
    """Return the pure function that makes one optimizer step from a batch and the mask of the rows that count."""

    def step(state: TrainState, batch: Examples, mask: Bool[Array, " batch"]) -> tuple[TrainState, StepRecord]:
        def batch_loss(params: Params) -> tuple[Array, Array]:
            logits = model.apply(params, batch.images)
            loss = losses.cross_entropy(logits, batch.labels, label_smoothing=label_smoothing)
            return batches.masked_mean(loss, mask), logits

        (loss, logits), grads = jax.value_and_grad(batch_loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        correct = losses.correct(logits, batch.labels).astype(jnp.float32)
        record = StepRecord(
            loss=loss,
            accuracy=batches.masked_mean(correct, mask),
            grad_norm=optax.tree.norm(grads),
            learning_rate=jnp.asarray(schedule(state.step), jnp.float32),
        )
        params = optax.apply_updates(state.params, updates)
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state, key=state.key), record

    return step


def run_steps(
    step: Step,
    state: TrainState,
    records: StepRecord,
    examples: Examples,
    order: Int[Array, "steps batch"],
    start: Int[Array, ""],
    stop: Int[Array, ""],
) -> tuple[TrainState, StepRecord]:
    """Make the steps of an epoch in [start, stop), in one loop on the device.

    The bounds are arguments of the loop, not of the compiler: one program serves every cut of the epoch, so that where
    it is cut changes no bit of the result.
    """

    def body(index: Array, carry: tuple[TrainState, StepRecord]) -> tuple[TrainState, StepRecord]:
        state, records = carry
        (images, labels), mask = batches.gather((examples.images, examples.labels), order[index])
        state, record = step(state, Examples(images=images, labels=labels), mask)
        return state, jax.tree.map(lambda column, value: column.at[index].set(value), records, record)

    return jax.lax.fori_loop(start, stop, body, (state, records))


def make_program(config: TrainConfig, model: Model, num_examples: int) -> Program:
    """Return the functions of a training, yet to be compiled.

    Args:
        config: the training.
        model: the network.
        num_examples: size of the training split.
    """
    steps_per_epoch = batches.num_batches(num_examples, config.batch_size)
    schedule = make_schedule(config.optimizer_config(), config.epochs * steps_per_epoch)
    optimizer = make_optimizer(config.optimizer_config(), schedule)
    step = make_step(model, optimizer, schedule, label_smoothing=config.label_smoothing)

    def init(key: Array) -> TrainState:
        weights_key, run_key = jax.random.split(key)
        params = model.init(key=weights_key)
        return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params), key=run_key)

    def order(key: Array, epoch: Array) -> Array:
        return batches.shuffled_batches(num_examples, config.batch_size, key=jax.random.fold_in(key, epoch))

    def examples() -> Examples:
        images = jnp.zeros((num_examples, *model.config.image_shape), jnp.uint8)
        return Examples(images=images, labels=jnp.zeros(num_examples, jnp.int32))

    return Program(
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        init=init,
        order=order,
        run_steps=functools.partial(run_steps, step),
        examples=jax.eval_shape(examples),
    )


def compile_engine(program: Program, *, clock: Callable[[], float]) -> Engine:
    """Compile a training; `clock` returns seconds, for the compile times."""
    key, index = _abstract_key(), jax.ShapeDtypeStruct((), jnp.int32)
    return Engine(
        epochs=program.epochs,
        steps_per_epoch=program.steps_per_epoch,
        init=compile_function("init", program.init, key, clock=clock),
        order=compile_function("order", program.order, key, index, clock=clock),
        run_steps=compile_run_steps(program, clock=clock),
    )


def compile_run_steps(program: Program, *, clock: Callable[[], float]) -> CompiledFunction:
    """Compile the loop of optimizer steps by itself; its static cost is that of one step."""
    key, index = _abstract_key(), jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(program.init, key)
    records = jax.eval_shape(lambda: StepRecord.empty(program.steps_per_epoch))
    order = jax.eval_shape(program.order, key, index)
    arguments = (state, records, program.examples, order, index, index)
    return compile_function("train_step", program.run_steps, *arguments, clock=clock, donate_argnums=(0, 1))


def train(engine: Engine, state: TrainState, examples: Examples, *, steps_per_call: int) -> Iterator[Chunk]:
    """Train, and hand out what happened after every `steps_per_call` steps and at the end of each epoch.

    Args:
        engine: compiled for these shapes.
        state: where to begin, `engine.init(key)` or the state of an earlier chunk; its memory is reused.
        examples: the training split.
        steps_per_call: how often the caller hears; changes no bit of the result.
    """
    done = int(state.step)
    key = jnp.copy(state.key)
    while done < engine.num_steps:
        epoch, first = divmod(done, engine.steps_per_epoch)
        order = engine.order(key, jnp.int32(epoch))
        records = StepRecord.empty(engine.steps_per_epoch)
        for start in range(first, engine.steps_per_epoch, steps_per_call):
            stop = min(start + steps_per_call, engine.steps_per_epoch)
            state, records = engine.run_steps(state, records, examples, order, jnp.int32(start), jnp.int32(stop))
            done = epoch * engine.steps_per_epoch + stop
            ends_epoch = stop == engine.steps_per_epoch
            yield Chunk(epoch=epoch + 1, ends_epoch=ends_epoch, step=done, state=state, records=records)


def _abstract_key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))
