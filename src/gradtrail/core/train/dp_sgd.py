"""DP-SGD: Poisson sampling, per-example clipping and Gaussian noise (Abadi et al., arXiv 1607.00133).

The noised gradient goes to any optimizer. Accounting is out of scope: the caller passes the noise multiplier.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Int, Key, PyTree

from gradtrail.core import batching
from gradtrail.core.batching import PADDING
from gradtrail.core.config import ConfigError
from gradtrail.core.nn.mlp import MLP, Linear
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.per_example import Clipping, clipped_grad_sum
from gradtrail.core.train import threefry
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.gradient import (
    Batch,
    Gradient,
    Metrics,
    RowRecord,
    Shared,
    batch_metrics,
    network_inputs,
)

OVERFLOW_SHARE = 1e-6  # chance that any batch of a training exceeds the capacity, as share of delta
_DENSE_ROWS = 1_088  # largest tile without convolutions
_ALIGNED = 8  # the rows of a tile without convolutions are a multiple: other tiles take a tenth longer
_ROWS = 16  # largest tile with convolutions: more rows do not fit into a CPU's caches with their gradients


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Sizes and noise of a private training, derived from its config."""

    noise_multiplier: float  # standard deviation of the noise in units of the clip norm; 0 for none, in tests
    num_examples: int  # number of examples of the training split
    capacity: int  # number of rows of every batch, a multiple of `tile` times the shards
    tile: int  # number of examples that are processed together

    @classmethod
    def for_training(
        cls, config: TrainConfig, model: Model, num_examples: int, num_steps: int, noise_multiplier: float
    ) -> "Mechanism":
        """Return the mechanism of a training of `num_steps`."""
        size = batch_capacity(num_examples, config.batch_size, num_steps, delta=config.privacy.delta)
        tile = _tile_size(config, model)
        unit = tile * config.shards
        capacity = math.ceil(size / unit) * unit
        return cls(noise_multiplier=noise_multiplier, num_examples=num_examples, capacity=capacity, tile=tile)


def rows_at_once(config: TrainConfig, model: Model) -> int:
    """Return the number of rows that a device processes together, in a private training or another one."""
    if config.privacy.enabled:
        return _tile_size(config, model) * config.privacy.augmentation_multiplicity
    return config.batch_size // (config.accumulation_steps * config.shards)


def _tile_size(config: TrainConfig, model: Model) -> int:
    copies, share = config.privacy.augmentation_multiplicity, config.batch_size // config.accumulation_steps
    is_dense = isinstance(model.config.network, MLP | Linear)
    largest = _dense_tile(config.batch_size, copies) if is_dense else _ROWS // copies
    return max(1, min(largest, share // config.shards))


def batch_capacity(num_examples: int, batch_size: int, num_steps: int, *, delta: float) -> int:
    """Return the largest size of a Poisson-sampled batch of a training; `batch_size` is the mean.

    The chance that any of `num_steps` batches is larger is at most `OVERFLOW_SHARE` times `delta`: by the union bound
    and Bernstein's inequality, P(X ≥ m + t) ≤ exp(-t² / (2v + 2t/3)) for a binomial X with mean m and variance v.
    """
    variance = batch_size * (1 - batch_size / num_examples)
    nats = math.log(num_steps / (OVERFLOW_SHARE * delta))
    excess = nats / 3 + math.sqrt((nats / 3) ** 2 + 2 * variance * nats)
    return min(num_examples, math.floor(batch_size + excess))


def _dense_tile(batch_size: int, copies: int) -> int:
    """Return a tile such that most batches, up to two standard deviations above the mean, fill whole tiles.

    The last tile of a batch is processed whole, and large products are fast: two tiles, or more of the largest size.
    """
    rows = copies * (batch_size + 2 * math.sqrt(batch_size))
    tiles = max(2, math.ceil(rows / _DENSE_ROWS))
    return math.ceil(rows / tiles / copies / _ALIGNED) * _ALIGNED


def poisson_batches(
    mechanism: Mechanism, batch_size: int, num_batches: int, *, key: Key[Array, ""], epoch: int
) -> Int[np.ndarray, "batches rows"]:
    """Draw the batches of an epoch, from 0: each example with probability `batch_size / num_examples`, independently.

    Drawn on the host, by a generator with the bits of the key and the epoch as seed: the size of a batch is binomial,
    and all sets of examples of one size are equally likely.

    Returns:
        int32 indices, ascending, with `PADDING` after them.

    Raises:
        ConfigError: a batch exceeds the capacity; one line.
    """
    count, capacity = mechanism.num_examples, mechanism.capacity
    rng = np.random.default_rng([*np.asarray(jax.random.key_data(key)).tolist(), epoch])
    batches = np.full((num_batches, capacity), PADDING, np.int32)
    for number, size in enumerate(rng.binomial(count, batch_size / count, num_batches)):
        if size > capacity:
            raise ConfigError(
                f"train.batch_size: Poisson sampling drew more than {capacity:,} examples for batch {number + 1} of "
                f"epoch {epoch + 1}, which has a chance of at most {OVERFLOW_SHARE:g} times train.privacy.delta; to "
                f"drop examples would break the privacy guarantee: try another train.seed"
            )
        batches[number, :size] = np.sort(rng.choice(count, size, replace=False, shuffle=False))
    return batches


def make_private_gradient(config: TrainConfig, model: Model, mechanism: Mechanism) -> Gradient:
    """Return the function that sums the clipped gradients of a batch, or of a device's share, without dividing the sum.

    Tiles of padding alone are skipped: examples precede the padding, and determine the number of tiles. The condition
    of the loop also states the largest number of tiles, with which the static cost is counted.
    """
    privacy, tile = config.privacy, mechanism.tile
    copies = privacy.augmentation_multiplicity
    frozen = frozenset(name for name in model.layers() if config.start.is_frozen(name))
    clipping = Clipping(norm=privacy.example_clip_norm, copies=copies, loss=config.loss, frozen=frozen)

    def gradient_of_tile(shared: Shared, batch: Batch) -> tuple[tuple[Params, Metrics], RowRecord]:
        copied = _copied(batch, copies)
        images, key = network_inputs(config, copied)
        grads, norms, logits = clipped_grad_sum(
            model, shared.params, images, copied.labels, batch.mask, clipping, key=key
        )
        logits = logits[::copies]  # those of the first copy
        loss = config.loss.per_example(logits, batch.labels)
        metrics, record = batch_metrics(batch, loss, logits, shared)
        clipped = (norms > privacy.example_clip_norm).astype(jnp.float32)
        metrics["clipped"] = batching.masked_sum(clipped, batch.mask) / shared.weight
        return (grads, metrics), record

    def gradient(shared: Shared, batch: Batch) -> tuple[tuple[Params, Metrics], RowRecord]:
        num_tiles = len(batch.indices) // tile
        tiles = batch.split(num_tiles)
        num_used = -(-jnp.sum(batch.mask) // tile)
        shapes = jax.eval_shape(gradient_of_tile, shared, jax.tree.map(lambda leaf: leaf[0], tiles))
        total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[0])
        records = jax.tree.map(lambda leaf: jnp.zeros((num_tiles, *leaf.shape), leaf.dtype), shapes[1])

        def has_tile(carry: tuple[Array, PyTree, RowRecord]) -> Array:
            return (carry[0] < num_used) & (carry[0] < num_tiles)

        def add(carry: tuple[Array, PyTree, RowRecord]) -> tuple[Array, PyTree, RowRecord]:
            index, total, records = carry
            tile_gradient, record = gradient_of_tile(shared, jax.tree.map(lambda leaf: leaf[index], tiles))
            records = jax.tree.map(lambda column, value: column.at[index].set(value), records, record)
            return index + 1, jax.tree.map(jnp.add, total, tile_gradient), records

        _, total, records = jax.lax.while_loop(has_tile, add, (jnp.int32(0), total, records))
        probability, correct = records.probability.ravel(), records.correct.ravel()
        return total, RowRecord(indices=batch.indices, probability=probability, correct=correct)

    return gradient


def noised_mean(grads: Params, config: TrainConfig, mechanism: Mechanism, *, key: Key[Array, ""]) -> Params:
    """Return (sum + σ C z) / batch size for a sum of clipped gradients, with z standard normal and float32.

    σ is the noise multiplier, C the clip norm; the batch size is the mean one, whatever the size of the batch.
    """
    scale = mechanism.noise_multiplier * config.privacy.example_clip_norm
    if not scale:
        return jax.tree.map(lambda leaf: leaf / config.batch_size, grads)
    flat, unflatten = ravel_pytree(grads)
    noise = unflatten(threefry.normals(key, flat.size))
    return jax.tree.map(lambda leaf, normal: (leaf + scale * normal) / config.batch_size, grads, noise)


def _copied(batch: Batch, copies: int) -> Batch:
    """Repeat each row `copies` times, with different keys."""

    def repeat(column: Array) -> Array:
        if jnp.issubdtype(column.dtype, jax.dtypes.prng_key):
            return jax.vmap(lambda key: jax.random.split(key, copies))(column).reshape(-1)
        return jnp.repeat(column, copies, axis=0)

    return batch if copies == 1 else jax.tree.map(repeat, batch)
