"""The gradient of a batch, in parts and tiles: sums over its rows, and a record of each row."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from gradtrail.core import batching
from gradtrail.core.nn import losses
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.train.augmentation import AugmentationConfig, augment, draw_shares
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.optimizers import squared_norm
from gradtrail.core.train.start import where_frozen


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Examples:
    """A split on the device, or a block of batches with a leading axis for the steps."""

    images: UInt8[Array, "..."]  # (*steps, examples, height, width[, channels]), 0 to 255
    labels: Int[Array, "*steps examples"]  # class of each example, int32
    # added to the weights of the losses of each example with each class as its label, which are 1 for its label and
    # else 0; None for no change. A change of -1 for its label removes an example from its batches.
    weight_changes: Float[Array, "examples classes"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Partners:
    """The examples that the rows of a batch are mixed with, one for each."""

    images: UInt8[Array, "..."]  # (*parts, batch, height, width[, channels])
    labels: Int[Array, "*parts batch"]
    shares: Float[Array, "*parts batch"]  # share of the row itself in its mixture, from 1/2 to 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch, a part of one, or the parts of one."""

    images: UInt8[Array, "..."]  # (*parts, batch, height, width[, channels])
    labels: Int[Array, "*parts batch"]
    indices: Int[Array, "*parts batch"]  # of the examples in the training split, int32, or `batching.PADDING`
    # weights of the losses with each class as the label; None for 1 for the label and else 0
    weights: Float[Array, "*parts batch classes"] | None = None
    augmentation: Key[Array, "*parts batch"] | None = None  # key of each row; None without augmentation
    dropout: Key[Array, "*parts batch"] | None = None  # key of each row; None without dropout
    partners: Partners | None = None  # None without mixup

    @property
    def mask(self) -> Bool[Array, "*parts batch"]:
        """False for padding."""
        return self.indices != batching.PADDING

    def split(self, num_parts: int) -> "Batch":
        """Return the batch with a leading axis for equal parts of it."""
        return jax.tree.map(lambda leaf: leaf.reshape(num_parts, -1, *leaf.shape[1:]), self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Shared:
    """Inputs of the gradient that all rows of a batch share, replicated over the devices."""

    params: Params  # parameters at which the gradient is taken
    scale: Float[Array, ""] | None  # factor of the loss; None for none
    weight: Float[Array, ""]  # sum of the weights of the losses of the whole batch, float32; 1 if that is 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowRecord:
    """Predictions for each row of a step's batch before the update; in an epoch, for each sampled example."""

    # indices of the examples in the training split, int32, or `batching.PADDING`. If dynamics are sampled, an epoch
    # has one row per sampled example, with its place among them, or `PADDING` before its visit.
    indices: Int[Array, "*steps rows"]
    probability: Float[Array, "*steps rows"]  # probability of the label, float32
    correct: Bool[Array, "*steps rows"]  # True if the label had the largest logit


Metrics = dict[str, Array]  # name → value, float32 unless stated otherwise; for several steps, with a leading axis

# Name → function logits, labels → a value of each example: what is measured beside the loss before the update
EXAMPLE_METRICS: Mapping[str, Callable[[Array, Array], Array]] = {
    "cross_entropy": losses.cross_entropy,  # in nats
    "accuracy": losses.correct,  # share of correct predictions
}

# The gradient of the scaled loss and the metrics, sums over rows divided by `Shared.weight`; and a record of each row
Gradient = Callable[[Shared, Batch], tuple[tuple[Params, Metrics], RowRecord]]


def make_gradient(config: TrainConfig, model: Model, *, in_tiles: bool) -> Gradient:
    """Return the gradient of a batch, or of a device's share, as the sum over its parts, one after the other.

    The parts are the `accumulation_steps`, or else, if `in_tiles`, tiles whose patches fit in a CPU's cache.
    """

    def part_gradient(shared: Shared, part: Batch) -> tuple[tuple[Params, Metrics], RowRecord]:
        def loss_fn(params: Params) -> tuple[Array, tuple[Metrics, RowRecord]]:
            images, key = network_inputs(config, part)
            params = (
                where_frozen(config.start, jax.lax.stop_gradient(params), params) if config.start.enabled else params
            )
            logits = model.apply(params, images, key=key)
            loss = config.loss.per_example(logits, part.labels)
            if part.weights is not None:
                loss = jnp.sum(part.weights * config.loss.per_class(logits), axis=1)
            if part.partners is not None:
                of_partner = config.loss.per_example(logits, part.partners.labels)
                loss = part.partners.shares * loss + (1.0 - part.partners.shares) * of_partner
            metrics, record = batch_metrics(part, loss, logits, shared)
            return metrics["loss"] if shared.scale is None else metrics["loss"] * shared.scale, (metrics, record)

        grads, (metrics, record) = jax.grad(loss_fn, has_aux=True)(shared.params)
        if config.accumulation_steps > 1:
            metrics["squared_part_norms"] = squared_norm(grads)
        return (grads, metrics), record

    def gradient(shared: Shared, batch: Batch) -> tuple[tuple[Params, Metrics], RowRecord]:
        num_rows, num_parts = len(batch.indices), config.accumulation_steps
        if num_parts == 1 and in_tiles:
            num_parts = num_rows // model.tile_size(num_rows)
        if num_parts == 1:
            return part_gradient(shared, batch)

        def add(total: tuple[Params, Metrics], part: Batch) -> tuple[tuple[Params, Metrics], RowRecord]:
            of_part, record = part_gradient(shared, part)
            return jax.tree.map(jnp.add, total, of_part), record

        parts = batch.split(num_parts)
        one, _ = jax.eval_shape(part_gradient, shared, jax.tree.map(lambda leaf: leaf[0], parts))
        total, records = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, one), parts)
        return total, jax.tree.map(jnp.ravel, records)

    return gradient


def network_inputs(config: TrainConfig, batch: Batch) -> tuple[Array, Key[Array, " batch"] | None]:
    """Return the images of a batch, augmented and mixed if configured, and the keys for dropout."""
    images: Array = batch.images
    if batch.augmentation is not None:
        # XLA stores the result of a conditional, and would compute that of other operations again for each pixel of a
        # convolution's kernel. It does not know that the condition is always true.
        images = jax.lax.cond(
            batch.indices[0] >= batching.PADDING,
            functools.partial(_augmented, config.augmentation),
            lambda rows, _: batching.normalize(rows.images),
            *(batch, batch.augmentation),
        )
    return images, None if batch.dropout is None else _purpose_keys(batch.dropout, 1)


def _augmented(
    config: AugmentationConfig, batch: Batch, key: Key[Array, " batch"]
) -> Float[Array, "batch height width *channels"]:
    """Return the images of a batch, augmented and mixed with those of their partners."""

    def augmented(images: Array, purpose: int) -> Array:
        return augment(batching.normalize(images), config, key=_purpose_keys(key, purpose))

    images = augmented(batch.images, 0)
    if batch.partners is None:
        return images
    shares = jnp.expand_dims(batch.partners.shares, range(1, images.ndim))
    return shares * images + (1.0 - shares) * augmented(batch.partners.images, 2)


def with_augmentation(config: AugmentationConfig, batch: Batch, *, key: Key[Array, " batch"]) -> Batch:
    """Return a whole batch with a key for each row, and for mixup with partners.

    The partner of a row is the row before it, that of the first row the last one that counts. Both images of a mixture
    are augmented, and its shares drawn, by the key of the row.
    """
    if not config.mixup:
        return dataclasses.replace(batch, augmentation=key)
    rows = jnp.arange(len(batch.indices), dtype=jnp.int32)
    before = jnp.where(rows == 0, jnp.sum(batch.mask), rows) - 1  # padding comes last
    shares = draw_shares(config.mixup, key=_purpose_keys(key, 1))
    partners = Partners(images=batch.images[before], labels=batch.labels[before], shares=shares)
    return dataclasses.replace(batch, augmentation=key, partners=partners)


def batch_metrics(
    batch: Batch, loss: Float[Array, " batch"], logits: Float[Array, "batch classes"], shared: Shared
) -> tuple[Metrics, RowRecord]:
    """Return the minimized loss, in nats, and `EXAMPLE_METRICS` as means over the whole batch; and a record of rows."""
    labels, values = batch.labels, {"loss": loss}
    values |= {name: metric(logits, batch.labels) for name, metric in EXAMPLE_METRICS.items()}
    means = {
        name: batching.masked_sum(value.astype(loss.dtype), batch.mask) / shared.weight
        for name, value in values.items()
    }
    probability, correct = losses.label_probability(logits, labels), losses.correct(logits, labels)
    return means, RowRecord(indices=batch.indices, probability=probability, correct=correct)


def _purpose_keys(key: Key[Array, " batch"], purpose: int) -> Key[Array, " batch"]:
    return jax.vmap(jax.random.fold_in, (0, None))(key, purpose)
