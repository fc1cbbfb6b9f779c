"""One optimizer step, as a pure function of a state, a batch and a key."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from gradtrail.core import batching
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.sharding import data_parallel, over_batch
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.dp_sgd import Mechanism, make_private_gradient, noised_mean
from gradtrail.core.train.gradient import Batch, Examples, RowRecord, Shared, make_gradient
from gradtrail.core.train.loss_scaling import LossScale, all_finite, initial_scale, next_scale
from gradtrail.core.train.optimizers import make_optimizer, squared_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RunKeys:
    """Keys of a whole training; never consumed, only folded with the epoch or the step."""

    order: Key[Array, ""]  # key of the order of the examples, or of the draws of Poisson-sampled batches
    augmentation: Key[Array, ""]
    dropout: Key[Array, ""]
    noise: Key[Array, ""] | None  # key of a private training's noise; else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that training carries from step to step."""

    step: Int[Array, ""]  # number of steps done, skipped ones included, int32
    params: Params  # the trained parameters
    opt_state: PyTree  # state of the Optax optimizer
    keys: RunKeys  # keys of the whole training
    average: Params | None  # moving average of the parameters; None if none is configured
    loss_scale: LossScale | None  # state of the loss scale; None if the loss is not scaled

    @property
    def evaluation_params(self) -> Params:
        """The parameters to evaluate and to keep: the moving average, if there is one."""
        return self.params if self.average is None else self.average


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of a step, float32 unless stated otherwise; for several steps, with a leading axis."""

    num_examples: Int[Array, "*steps"]  # number of examples in the batch, without those that were removed, int32
    loss: Float[Array, "*steps"]  # mean of the minimized loss over the batch, in nats
    cross_entropy: Float[Array, "*steps"]  # mean over the batch, in nats
    accuracy: Float[Array, "*steps"]  # share of correct predictions in the batch, before the update
    # global L2 norm of the mean gradient, before clipping; in a private training with its noise
    grad_norm: Float[Array, "*steps"]
    learning_rate: Float[Array, "*steps"]  # learning rate of this step
    # root mean square of the norms of the mean gradients of the batch's parts; with `grad_norm` it gives the gradient
    # noise scale. Each device has its parts. None without `accumulation_steps`, and in a private training.
    part_grad_norm: Float[Array, "*steps"] | None
    loss_scale: Float[Array, "*steps"] | None  # factor of this step's loss; None if the loss is not scaled
    # True if the step changed nothing because its gradients were not finite; None if the loss is not scaled
    skipped: Bool[Array, "*steps"] | None
    # records of the batch's rows, or of the sampled examples, see `RowRecord`; None in a `History`
    rows: RowRecord | None
    observed: PyTree | None = None  # result of `observe` of `make_step`; None without it


_NOISE = 2**32 - 1  # folded into the key for dropout and augmentation; the order of an epoch folds in its number

Step = Callable[[TrainState, Batch], tuple[TrainState, StepRecord]]
Observe = Callable[[Params, Params], PyTree]


def make_init(config: TrainConfig, model: Model, num_steps: int) -> Callable[[Array], TrainState]:
    """Return the function from keys, of initialization and of `RunKeys`, to the state before the first step."""
    optimizer = make_optimizer(config.optimizer, config.schedule, config.clip_norm, num_steps)

    def init(keys: Key[Array, " purposes"]) -> TrainState:
        pairs = jax.vmap(jax.random.split)(keys)
        params = model.init(key=pairs[0, 0])
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=optimizer.init(params),
            keys=RunKeys(
                order=pairs[1, 1],
                augmentation=pairs[2, 1],
                dropout=pairs[3, 1],
                noise=pairs[4, 1] if config.privacy.enabled else None,
            ),
            average=None if config.average_decay is None else jax.tree.map(jnp.copy, params),
            loss_scale=initial_scale(config.loss_scaling) if config.scales_loss else None,
        )

    return init


def take(examples: Examples, indices: Int[Array, " batch"]) -> Batch:
    """Return the batch of the examples of a split at these indices; padding has the data of example 0.

    With changes of the weights, the label of an example is the class of its largest weight, and an example without a
    positive weight is padding: it was removed, and counts nowhere.
    """
    rows = jnp.where(indices != batching.PADDING, indices, 0)
    batch = Batch(images=examples.images[rows], labels=examples.labels[rows], indices=indices)
    if examples.weight_changes is None:
        return batch
    weights = jax.nn.one_hot(batch.labels, examples.weight_changes.shape[1]) + examples.weight_changes[rows]
    return dataclasses.replace(
        batch,
        labels=jnp.argmax(weights, axis=1).astype(jnp.int32),
        indices=jnp.where(jnp.max(weights, axis=1) > 0, indices, batching.PADDING),
        weights=weights,
    )


def make_step(
    config: TrainConfig,
    model: Model,
    num_steps: int,
    mesh: Mesh,
    mechanism: Mechanism | None = None,
    observe: Observe | None = None,
) -> Step:
    """Return the pure function that makes one step of a training of `num_steps`, from a state and a batch.

    The batch is split over the devices of `mesh`. Private training has a `mechanism`. `observe` gets the parameters
    before the step and the gradient for the optimizer; its result is in the record.
    """
    optimizer = make_optimizer(config.optimizer, config.schedule, config.clip_norm, num_steps)
    rate = config.optimizer.rate(config.schedule, num_steps)
    if mechanism is None:
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        gradient = make_gradient(config, model, in_tiles=on_cpu)
    else:
        gradient = make_private_gradient(config, model, mechanism)
    gradient = data_parallel(gradient, mesh, ordered=config.reduction == "ordered")
    num_parts = config.accumulation_steps * mesh.size

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepRecord]:
        # The gradient of the batch, each row with keys of its own
        scale = None if state.loss_scale is None else state.loss_scale.scale
        count = jnp.sum(batch.mask).astype(jnp.float32)
        weight = count if mechanism is None else jnp.maximum(count, 1.0)  # a Poisson-sampled batch may be empty
        if batch.weights is not None:
            total = jnp.sum(jnp.where(batch.mask[:, None], batch.weights, 0.0))
            weight = jnp.where(total > 0, total, 1.0)  # all examples of a batch may be removed
        shared = Shared(params=state.params, scale=scale, weight=weight)
        keys_of_rows = _row_keys if mechanism is None else _example_keys
        if config.augmentation.enabled:
            batch = dataclasses.replace(batch, augmentation=keys_of_rows(state.keys.augmentation, state.step, batch))
        if model.config.network.dropout:
            batch = dataclasses.replace(batch, dropout=keys_of_rows(state.keys.dropout, state.step, batch))
        if mesh.size > 1:
            batch = jax.lax.with_sharding_constraint(batch, over_batch(mesh))
        sums, record_of_rows = gradient(shared, batch)
        grads = sums.grads if scale is None else jax.tree.map(lambda leaf: leaf / scale, sums.grads)
        if mechanism is not None and state.keys.noise is not None:
            grads = noised_mean(grads, config, mechanism, key=jax.random.fold_in(state.keys.noise, state.step))

        # The update
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        applied = state.step if state.loss_scale is None else state.step - state.loss_scale.skipped_steps
        average = _averaged(config, state.average, params, applied)
        moved = dataclasses.replace(state, params=params, opt_state=opt_state, average=average)

        record = StepRecord(
            num_examples=count.astype(jnp.int32),
            loss=sums.loss,
            cross_entropy=sums.cross_entropy,
            accuracy=sums.accuracy,
            grad_norm=jnp.sqrt(squared_norm(grads)),
            learning_rate=jnp.asarray(rate(applied), jnp.float32),
            part_grad_norm=_root_mean_square(sums.squared_norms, num_parts, scale),
            loss_scale=None,
            skipped=None,
            rows=record_of_rows,
            observed=None if observe is None else observe(state.params, grads),
        )

        # Under loss scaling, a step whose gradient is not finite changes nothing but the scale
        if state.loss_scale is not None:
            finite = all_finite(grads)
            moved = jax.tree.map(functools.partial(jnp.where, finite), moved, state)
            loss_scale = next_scale(config.loss_scaling, state.loss_scale, finite)
            moved = dataclasses.replace(moved, loss_scale=loss_scale)
            record = dataclasses.replace(record, loss_scale=scale, skipped=~finite)
        return dataclasses.replace(moved, step=state.step + 1), record

    return step


def empty_records(config: TrainConfig, num_steps: int, by_row: tuple[int, ...]) -> StepRecord:
    """Return records of `num_steps` steps, on the host: all 0 except indices, which are `batching.PADDING`.

    The records of rows have the shape `by_row`: (steps, rows of a step), or (examples,) if examples are sampled.
    """

    def zeros(dtype: type = np.float32, shape: tuple[int, ...] = (num_steps,)) -> Any:
        return np.zeros(shape, dtype)

    indices: Any = np.full(by_row, batching.PADDING, np.int32)
    return StepRecord(
        num_examples=zeros(np.int32),
        **{name: zeros() for name in ("loss", "cross_entropy", "accuracy", "grad_norm", "learning_rate")},
        part_grad_norm=zeros() if config.measures_parts else None,
        loss_scale=zeros() if config.scales_loss else None,
        skipped=zeros(bool) if config.scales_loss else None,
        rows=RowRecord(indices=indices, probability=zeros(shape=by_row), correct=zeros(bool, by_row)),
    )


def _root_mean_square(
    squared_norms: Float[Array, ""] | None, num_parts: int, scale: Float[Array, ""] | None
) -> Float[Array, ""] | None:
    """Return the RMS of the parts' mean-gradient norms, from norms that are divided by the size of the whole batch."""
    if squared_norms is None:
        return None
    norm = jnp.sqrt(num_parts * squared_norms)
    return norm if scale is None else norm / scale


def _row_keys(key: Key[Array, ""], step: Int[Array, ""], batch: Batch) -> Key[Array, " batch"]:
    """Return a key for each row of a step's batch, whichever device or part the row belongs to."""
    return jax.random.split(jax.random.fold_in(jax.random.fold_in(key, _NOISE), step), len(batch.indices))


def _example_keys(key: Key[Array, ""], step: Int[Array, ""], batch: Batch) -> Key[Array, " batch"]:
    """Return a key for each example of a step's batch, independent of the other examples in it."""
    step_key = jax.random.fold_in(jax.random.fold_in(key, _NOISE), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(step_key, batch.indices)


def _averaged(config: TrainConfig, average: Params | None, params: Params, step: Int[Array, ""]) -> Params | None:
    """Update the moving average; its decay is lower in early steps, so that it soon forgets the initial weights."""
    if config.average_decay is None:
        return None
    step = step.astype(jnp.float32)
    decay = jnp.minimum(config.average_decay, (1.0 + step) / (10.0 + step))
    averaged: Params = optax.incremental_update(params, average, 1.0 - decay)
    return averaged
