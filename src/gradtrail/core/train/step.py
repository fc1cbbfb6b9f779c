"""One optimizer step, as a pure function of a state, a batch and a key."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, PyTree

from gradtrail.core import batching
from gradtrail.core.nn.models import Model, Params, by_path
from gradtrail.core.sharding import data_parallel, over_batch, put
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.dp_sgd import Mechanism, make_private_gradient, noised_mean
from gradtrail.core.train.gradient import (
    EXAMPLE_METRICS,
    Batch,
    Examples,
    Gradient,
    Metrics,
    RowRecord,
    Shared,
    make_gradient,
    with_augmentation,
)
from gradtrail.core.train.loss_scaling import LossScale, all_finite, initial_scale, next_scale
from gradtrail.core.train.optimizers import make_optimizer, squared_norm
from gradtrail.core.train.start import where_frozen


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
    def num_updates(self) -> Int[Array, ""]:
        """Number of steps done that changed the parameters, int32."""
        return self.step if self.loss_scale is None else self.step - self.loss_scale.skipped_steps

    @property
    def evaluation_params(self) -> Params:
        """The parameters to evaluate and to keep: the moving average, if there is one."""
        return self.params if self.average is None else self.average


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is measured in a step; for several steps, with a leading axis."""

    metrics: Metrics  # see `metric_types`
    rows: RowRecord  # records of the batch's rows, or of the sampled examples
    observed: PyTree | None = None  # result of `observe` of `make_step`; None without it


AVERAGED = ("loss", *EXAMPLE_METRICS, "clipped")  # metrics of steps of which an epoch has the mean


def metric_types(config: TrainConfig) -> dict[str, type]:
    """Return the metrics that a step of a training has, with their dtypes."""
    names = ["loss", *EXAMPLE_METRICS]  # means over the batch before the update, the minimized loss in nats
    names += ["grad_norm", "learning_rate"]  # global L2 norm of the gradient for the optimizer, before clipping
    if config.privacy.enabled or config.clip_norm is not None:
        names += ["clipped"]  # share of a private batch whose gradients were clipped; else 1 if the step's one was
    if config.measures_parts:
        # Root mean square of the norms of the mean gradients of the batch's parts, of which each device has its own;
        # with `grad_norm` it gives the gradient noise scale
        names += ["part_grad_norm"]
    types: dict[str, type] = dict.fromkeys(names, np.float32)
    types |= {"num_examples": np.int32}  # of the batch, without those that were removed
    return types | ({"loss_scale": np.float32, "skipped": bool} if config.scales_loss else {})


_NOISE = 2**32 - 1  # folded into the key for dropout and augmentation; the order of an epoch folds in its number

Step = Callable[[TrainState, Batch], tuple[TrainState, StepRecord]]
Observe = Callable[[Params, Params], PyTree]


def make_init(config: TrainConfig, model: Model, num_steps: int) -> Callable[[Array], TrainState]:
    """Return the function from keys, of initialization and of `RunKeys`, to the state before the first step."""
    optimizer = make_optimizer(config.optimizer, config.schedule, config.clip_norm, num_steps, config.start)

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


def started_from(state: TrainState, tensors: Mapping[str, Float[np.ndarray, "..."]]) -> TrainState:
    """Return a first state with copies of these parameters, by path; the others stay as they were drawn."""

    def placed(params: Params) -> Params:
        leaves = by_path(params)
        leaves |= {path: put(np.array(values), leaves[path].sharding) for path, values in tensors.items()}
        return jax.tree.unflatten(jax.tree.structure(params), leaves.values())

    average = None if state.average is None else placed(state.average)
    return dataclasses.replace(state, params=placed(state.params), average=average)


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
    optimizer = make_optimizer(config.optimizer, config.schedule, config.clip_norm, num_steps, config.start)
    rate = config.optimizer.rate(config.schedule, num_steps)
    if mechanism is None:
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        gradient = make_gradient(config, model, in_tiles=on_cpu)
    else:
        gradient = make_private_gradient(config, model, mechanism)
    gradient = data_parallel(gradient, mesh, ordered=config.reduction == "ordered")
    keys_of_rows = _row_keys if mechanism is None else _example_keys

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepRecord]:
        if config.augmentation.enabled:
            key = keys_of_rows(state.keys.augmentation, state.step, batch)
            batch = with_augmentation(config.augmentation, batch, key=key)
        if model.config.network.dropout:
            batch = dataclasses.replace(batch, dropout=keys_of_rows(state.keys.dropout, state.step, batch))
        if mesh.size > 1:
            batch = jax.lax.with_sharding_constraint(batch, over_batch(mesh))
        grads, metrics, rows = grad_fn(config, gradient, state, batch, mechanism)
        metrics["learning_rate"] = jnp.asarray(rate(state.num_updates), jnp.float32)
        observed = None if observe is None else observe(state.params, grads)
        return update_fn(config, optimizer, state, grads), StepRecord(metrics=metrics, rows=rows, observed=observed)

    return step


def grad_fn(
    config: TrainConfig, gradient: Gradient, state: TrainState, batch: Batch, mechanism: Mechanism | None
) -> tuple[Params, Metrics, RowRecord]:
    """Return the gradient for the optimizer, the metrics of the batch, and a record of each of its rows.

    The gradient is that of the mean loss; in a private training it is the noised mean of the clipped gradients.
    """
    scale = None if state.loss_scale is None else state.loss_scale.scale
    count = jnp.sum(batch.mask).astype(jnp.float32)
    weight = count if mechanism is None else jnp.maximum(count, 1.0)  # a Poisson-sampled batch may be empty
    if batch.weights is not None:
        total = jnp.sum(jnp.where(batch.mask[:, None], batch.weights, 0.0))
        weight = jnp.where(total > 0, total, 1.0)  # all examples of a batch may be removed
    (grads, metrics), rows = gradient(Shared(params=state.params, scale=scale, weight=weight), batch)
    if scale is not None:
        grads = jax.tree.map(lambda leaf: leaf / scale, grads)
        metrics |= {"loss_scale": scale, "skipped": ~all_finite(grads)}
    if mechanism is not None and state.keys.noise is not None:
        grads = noised_mean(grads, config, mechanism, key=jax.random.fold_in(state.keys.noise, state.step))
        if config.start.enabled:
            grads = where_frozen(config.start, jax.tree.map(jnp.zeros_like, grads), grads)
    norm = jnp.sqrt(squared_norm(grads))
    metrics |= {"num_examples": count.astype(jnp.int32), "grad_norm": norm}
    if mechanism is None and config.clip_norm is not None:
        metrics["clipped"] = (norm > config.clip_norm).astype(jnp.float32)
    if config.measures_parts:
        num_parts = config.accumulation_steps * config.shards  # their norms are divided by the size of the whole batch
        part_norm = jnp.sqrt(num_parts * metrics.pop("squared_part_norms"))
        metrics["part_grad_norm"] = part_norm if scale is None else part_norm / scale
    return grads, metrics, rows


def update_fn(
    config: TrainConfig, optimizer: optax.GradientTransformation, state: TrainState, grads: Params
) -> TrainState:
    """Return the state after a step; under loss scaling, a gradient that is not finite changes the scale alone."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = where_frozen(config.start, state.params, optax.apply_updates(state.params, updates))
    average = where_frozen(config.start, state.average, _averaged(config, state.average, params, state.num_updates))
    moved = dataclasses.replace(state, params=params, opt_state=opt_state, average=average)
    if state.loss_scale is not None:
        finite = all_finite(grads)
        moved = jax.tree.map(functools.partial(jnp.where, finite), moved, state)
        moved = dataclasses.replace(moved, loss_scale=next_scale(config.loss_scaling, state.loss_scale, finite))
    return dataclasses.replace(moved, step=state.step + 1)


def empty_records(config: TrainConfig, num_steps: int, by_row: tuple[int, ...]) -> StepRecord:
    """Return records of `num_steps` steps, on the host: all 0 except indices, which are `batching.PADDING`.

    The records of rows have the shape `by_row`: (steps, rows of a step), or (examples,) if examples are sampled.
    """
    metrics: Any = {name: np.zeros(num_steps, dtype) for name, dtype in metric_types(config).items()}
    indices: Any = np.full(by_row, batching.PADDING, np.int32)
    probability: Any = np.zeros(by_row, np.float32)
    correct: Any = np.zeros(by_row, bool)
    return StepRecord(metrics=metrics, rows=RowRecord(indices=indices, probability=probability, correct=correct))


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
