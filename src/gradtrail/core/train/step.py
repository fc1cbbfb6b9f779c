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
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt8

from gradtrail.core.common import batching
from gradtrail.core.common.sharding import data_parallel
from gradtrail.core.data.augmentation import augment
from gradtrail.core.nn import losses
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.loss_scaling import LossScale, adjusted, all_finite, initial_scale
from gradtrail.core.train.optimizers import evaluation_params, learning_rate, make_optimizer, squared_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RunKeys:
    """Keys of a whole training; never consumed, only folded with the epoch or the step. One seed gives equal ones."""

    order: Key[Array, ""]
    augmentation: Key[Array, ""]
    dropout: Key[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that training carries from step to step.

    Attributes:
        step: number of steps done, skipped ones included, int32.
        params: the trained parameters; see `params_to_evaluate` for those to evaluate.
        opt_state: state of the Optax optimizer.
        keys: of the whole training.
        average: moving average of the parameters; None where none is configured.
        loss_scale: None where the loss is not scaled.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: PyTree
    keys: RunKeys
    average: Params | None
    loss_scale: LossScale | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowRecord:
    """Predictions for each row of a step's batch, before the update.

    Attributes:
        indices: of the examples in the training split, int32, or `batching.PADDING`.
        probability: of the label, float32.
        correct: whether the label had the largest logit.
    """

    indices: Int[Array, "*steps batch"]
    probability: Float[Array, "*steps batch"]
    correct: Bool[Array, "*steps batch"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of a step, float32 unless stated otherwise; for several steps, with a leading axis.

    Attributes:
        num_examples: in the batch, int32.
        loss: mean over the batch, in nats, label smoothing included.
        cross_entropy: mean over the batch, in nats, without label smoothing.
        accuracy: over the batch, before the update.
        grad_norm: global L2 norm of the mean gradient, before clipping.
        learning_rate: of this step.
        part_grad_norm: root mean square of the norms of the mean gradients of the batch's parts; with `grad_norm` it
            gives the gradient noise scale. Each device has parts of its own. None without `accumulation_steps`.
        loss_scale: factor of this step's loss; None where the loss is not scaled.
        skipped: whether the step changed nothing because its gradients were not finite, bool; None likewise.
        rows: of the batch; None in a `History`, which summarizes them.
    """

    num_examples: Int[Array, "*steps"]
    loss: Float[Array, "*steps"]
    cross_entropy: Float[Array, "*steps"]
    accuracy: Float[Array, "*steps"]
    grad_norm: Float[Array, "*steps"]
    learning_rate: Float[Array, "*steps"]
    part_grad_norm: Float[Array, "*steps"] | None
    loss_scale: Float[Array, "*steps"] | None
    skipped: Bool[Array, "*steps"] | None
    rows: RowRecord | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Examples:
    """A split on the device.

    Attributes:
        images: uint8 pixels, 0 to 255.
        labels: class of each example, int32.
    """

    images: UInt8[Array, "examples height width"]
    labels: Int[Array, " examples"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the gradient of every row of a batch needs, replicated over the devices.

    Attributes:
        params: where the gradient is taken.
        scale: factor of the loss; None for none.
        count: rows of the whole batch that are not padding, float32.
        examples: the training split.
    """

    params: Params
    scale: Float[Array, ""] | None
    count: Float[Array, ""]
    examples: Examples


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """A batch, or a part of one.

    Attributes:
        indices: of the examples, int32, or `batching.PADDING`.
        augmentation: key of each row; None without augmentation.
        dropout: key of each row; None without dropout.
    """

    indices: Int[Array, " batch"]
    augmentation: Key[Array, " batch"] | None
    dropout: Key[Array, " batch"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BatchGradient:
    """Sums over rows, divided by the number of examples in the whole batch.

    Attributes:
        loss: in nats, not scaled.
        cross_entropy: likewise, without label smoothing.
        accuracy: share of correct predictions.
        grads: gradient of the scaled loss.
        squared_norms: sum of the squared norms of the gradients of the batch's parts; None for a single part.
    """

    loss: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    accuracy: Float[Array, ""]
    grads: Params
    squared_norms: Float[Array, ""] | None


_NOISE = 2**32 - 1  # folded into the key for dropout and augmentation; the order of an epoch folds in its number

Step = Callable[[TrainState, Examples, Int[Array, " batch"]], tuple[TrainState, StepRecord]]
Gradient = Callable[[Shared, Rows], tuple[BatchGradient, RowRecord]]


def make_init(config: TrainConfig, model: Model, num_steps: int) -> Callable[[Array], TrainState]:
    """Return the function from keys, of initialization and of `RunKeys`, to the state before the first step."""
    optimizer = make_optimizer(config.optimizer_config(), num_steps)

    def init(keys: Key[Array, "4"]) -> TrainState:
        pairs = jax.vmap(jax.random.split)(keys)
        params = model.init(key=pairs[0, 0])
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=optimizer.init(params),
            keys=RunKeys(order=pairs[1, 1], augmentation=pairs[2, 1], dropout=pairs[3, 1]),
            average=None if config.average_decay is None else jax.tree.map(jnp.copy, params),
            loss_scale=initial_scale(config.loss_scaling) if config.scales_loss else None,
        )

    return init


def make_step(config: TrainConfig, model: Model, num_steps: int, mesh: Mesh) -> Step:
    """Return the pure function that makes one step of a training of `num_steps`.

    It takes the state, the training split, and the int32 indices of the batch's examples in it, which may be
    `batching.PADDING`. The batch is split over the devices of `mesh`.
    """
    optimizer = make_optimizer(config.optimizer_config(), num_steps)
    rate = learning_rate(config.optimizer_config(), num_steps)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    gradient = data_parallel(_make_gradient(config, model, in_tiles=on_cpu), mesh)
    num_parts = config.accumulation_steps * mesh.size
    augments = config.augmentation.enabled

    def step(state: TrainState, examples: Examples, indices: Array) -> tuple[TrainState, StepRecord]:
        scale = None if state.loss_scale is None else state.loss_scale.scale
        count = jnp.sum(indices != batching.PADDING).astype(jnp.float32)
        shared = Shared(params=state.params, scale=scale, count=count, examples=examples)
        augmentation = _row_keys(state.keys.augmentation, state.step, len(indices)) if augments else None
        dropout = _row_keys(state.keys.dropout, state.step, len(indices)) if model.config.dropout else None
        found, rows = gradient(shared, Rows(indices=indices, augmentation=augmentation, dropout=dropout))
        grads = found.grads if scale is None else jax.tree.map(lambda leaf: leaf / scale, found.grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        applied = state.step if state.loss_scale is None else state.step - state.loss_scale.skipped_steps
        average = _averaged(config, state.average, params, applied)
        moved = dataclasses.replace(state, params=params, opt_state=opt_state, average=average)
        record = StepRecord(
            num_examples=count.astype(jnp.int32),
            loss=found.loss,
            cross_entropy=found.cross_entropy,
            accuracy=found.accuracy,
            grad_norm=jnp.sqrt(squared_norm(grads)),
            learning_rate=jnp.asarray(rate(applied), jnp.float32),
            part_grad_norm=_root_mean_square(found.squared_norms, num_parts, scale),
            loss_scale=None,
            skipped=None,
            rows=rows,
        )
        if state.loss_scale is not None:
            finite = all_finite(grads)
            moved = jax.tree.map(functools.partial(jnp.where, finite), moved, state)
            loss_scale = adjusted(config.loss_scaling, state.loss_scale, finite)
            moved = dataclasses.replace(moved, loss_scale=loss_scale)
            record = dataclasses.replace(record, loss_scale=scale, skipped=~finite)
        return dataclasses.replace(moved, step=state.step + 1), record

    return step


def params_to_evaluate(config: TrainConfig, state: TrainState) -> Params:
    """Return the parameters to evaluate: the moving average, or that of schedule-free, where there is one."""
    if state.average is not None:
        return state.average
    return evaluation_params(config.optimizer_config(), state.opt_state, state.params)


def empty_records(config: TrainConfig, num_steps: int) -> StepRecord:
    """Return records of `num_steps` steps, on the host: entries are 0, indices `batching.PADDING`."""
    by_row = (num_steps, config.batch_size)

    def zeros(dtype: type = np.float32, shape: tuple[int, ...] = (num_steps,)) -> Any:
        return np.zeros(shape, dtype)

    indices: Any = np.full(by_row, batching.PADDING, np.int32)
    return StepRecord(
        num_examples=zeros(np.int32),
        **{name: zeros() for name in ("loss", "cross_entropy", "accuracy", "grad_norm", "learning_rate")},
        part_grad_norm=zeros() if config.accumulation_steps > 1 else None,
        loss_scale=zeros() if config.scales_loss else None,
        skipped=zeros(bool) if config.scales_loss else None,
        rows=RowRecord(indices=indices, probability=zeros(shape=by_row), correct=zeros(bool, by_row)),
    )


def _make_gradient(config: TrainConfig, model: Model, *, in_tiles: bool) -> Gradient:
    """Return the gradient of a batch, or of a device's share, in `accumulation_steps` parts, maybe each in tiles."""

    def tile(shared: Shared, rows: Rows) -> tuple[BatchGradient, RowRecord]:
        def loss_fn(params: Params) -> tuple[Array, tuple[dict[str, Array], RowRecord]]:
            (images, labels), mask = batching.gather((shared.examples.images, shared.examples.labels), rows.indices)
            if rows.augmentation is not None:
                images = augment(batching.normalize(images), config.augmentation, key=_of_purpose(rows.augmentation, 0))
            key = None if rows.dropout is None else _of_purpose(rows.dropout, 1)
            logits = model.apply(params, images, key=key)
            loss = losses.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
            mean_loss = batching.masked_sum(loss, mask) / shared.count
            cross_entropy = batching.masked_sum(losses.cross_entropy(logits, labels), mask) / shared.count
            correct = losses.correct(logits, labels)
            accuracy = batching.masked_sum(correct.astype(jnp.float32), mask) / shared.count
            probability = losses.label_probability(logits, labels)
            record = RowRecord(indices=rows.indices, probability=probability, correct=correct)
            metrics = {"loss": mean_loss, "cross_entropy": cross_entropy, "accuracy": accuracy}
            return mean_loss if shared.scale is None else mean_loss * shared.scale, (metrics, record)

        grads, (metrics, record) = jax.grad(loss_fn, has_aux=True)(shared.params)
        return BatchGradient(**metrics, grads=grads, squared_norms=None), record

    def part(shared: Shared, rows: Rows) -> tuple[BatchGradient, RowRecord]:
        num_rows = len(rows.indices)
        found, record = _summed(tile, num_rows // model.tile_size(num_rows) if in_tiles else 1)(shared, rows)
        squared_norms = squared_norm(found.grads) if config.accumulation_steps > 1 else None
        return dataclasses.replace(found, squared_norms=squared_norms), record

    return _summed(part, config.accumulation_steps)


def _summed(gradient: Gradient, num_parts: int) -> Gradient:
    """Return `gradient` of a batch in equal parts, one after the other."""
    if num_parts == 1:
        return gradient

    def summed(shared: Shared, rows: Rows) -> tuple[BatchGradient, RowRecord]:
        def add(total: BatchGradient, rows: Rows) -> tuple[BatchGradient, RowRecord]:
            found, record = gradient(shared, rows)
            return jax.tree.map(jnp.add, total, found), record

        parts = jax.tree.map(lambda leaf: leaf.reshape(num_parts, -1), rows)
        one, _ = jax.eval_shape(gradient, shared, jax.tree.map(lambda leaf: leaf[0], parts))
        total, records = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, one), parts)
        return total, jax.tree.map(jnp.ravel, records)

    return summed


def _root_mean_square(
    squared_norms: Float[Array, ""] | None, num_parts: int, scale: Float[Array, ""] | None
) -> Float[Array, ""] | None:
    """Return the RMS of the parts' mean-gradient norms, from norms that are divided by the size of the whole batch."""
    if squared_norms is None:
        return None
    norm = jnp.sqrt(num_parts * squared_norms)
    return norm if scale is None else norm / scale


def _row_keys(key: Key[Array, ""], step: Int[Array, ""], batch_size: int) -> Key[Array, " batch"]:
    """Return a key for each row of a step's batch, whichever device or part the row belongs to."""
    return jax.random.split(jax.random.fold_in(jax.random.fold_in(key, _NOISE), step), batch_size)


def _of_purpose(key: Key[Array, " batch"], purpose: int) -> Key[Array, " batch"]:
    return jax.vmap(jax.random.fold_in, (0, None))(key, purpose)


def _averaged(config: TrainConfig, average: Params | None, params: Params, step: Int[Array, ""]) -> Params | None:
    """Update the moving average; its decay is lower in early steps, so that it soon forgets the initial weights."""
    if config.average_decay is None:
        return None
    step = step.astype(jnp.float32)
    decay = jnp.minimum(config.average_decay, (1.0 + step) / (10.0 + step))
    averaged: Params = optax.incremental_update(params, average, 1.0 - decay)
    return averaged
