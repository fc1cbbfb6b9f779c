"""DP-SGD: Poisson sampling, per-example clipping and Gaussian noise (Abadi et al., arXiv 1607.00133).

The noised gradient goes to any optimizer. Accounting is out of scope: the caller passes the noise multiplier.
"""

import itertools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, UInt32

from gradtrail.core import batching
from gradtrail.core.config import ConfigError
from gradtrail.core.nn import losses
from gradtrail.core.nn.cnn import CNN
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.per_example import Clipping, clipped_grad_sum
from gradtrail.core.train import threefry
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.gradient import (
    Batch,
    BatchGradient,
    Gradient,
    RowRecord,
    Shared,
    batch_metrics,
    network_inputs,
)
from gradtrail.core.train.privacy import OVERFLOW_SHARE, batch_capacity

OVERFLOW = -2  # all indices of a batch that exceeds the capacity
_DENSE_ROWS = 1_088  # largest tile without convolutions
_LARGEST_SHARE = 0.57  # largest tile, as share of a mean batch: one tile for the batch takes longer than two, measured
_ALIGNED = 8  # divisor of the rows of a tile without convolutions: other tiles take a tenth longer
_TILE_COST = 32  # fixed cost of a tile without convolutions, in rows
_ROWS = 16  # largest tile with convolutions: more rows do not fit into a CPU's caches with their gradients
_WORD = 32  # bits of the words in which `_indices_of` finds the examples drawn


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
        """Return the mechanism of a training of `num_steps`; its capacity is a multiple of tiles and shards."""
        room = batch_capacity(num_examples, config.batch_size, num_steps, delta=config.privacy.delta)
        copies, share = config.privacy.augmentation_multiplicity, config.batch_size // config.accumulation_steps
        most = (
            _ROWS // copies
            if isinstance(model.config.network, CNN)
            else _dense_tile(num_examples, config.batch_size, copies)
        )
        tile = max(1, min(most, share // config.shards))
        step = tile * config.shards
        return cls(
            noise_multiplier=noise_multiplier, num_examples=num_examples, capacity=-(-room // step) * step, tile=tile
        )


def poisson_batches(
    mechanism: Mechanism, batch_size: int, num_batches: int, *, key: Key[Array, ""]
) -> Int[Array, "batches rows"]:
    """Draw batches by Poisson sampling: each example with probability `batch_size / num_examples`, independently.

    A draw compares 32 random bits with the rate, so that the rate is at most 2⁻³² too small.

    Returns:
        int32 indices, ascending, with `batching.PADDING` after them. All indices of a batch that exceeds `capacity` are
        `OVERFLOW`.
    """
    count, capacity = mechanism.num_examples, mechanism.capacity
    threshold = int(batch_size / count * 2**32)

    def draw(key: Array) -> Array:
        bits = threefry.bits(key, count)
        drawn = bits < jnp.uint32(threshold) if threshold < 2**32 else jnp.ones(count, bool)
        return jnp.where(jnp.sum(drawn) > capacity, OVERFLOW, _indices_of(drawn, capacity))

    return jax.lax.map(draw, jax.random.split(key, num_batches))


def _dense_tile(num_examples: int, batch_size: int, copies: int) -> int:
    """Return the number of examples of a tile that minimizes the mean time of a batch over the sizes of batches.

    Large products are fast, but the last tile of a batch is processed whole: the mean batch should fill its tiles and
    leave room for somewhat larger ones. The sizes are assumed to be normal.
    """
    deviation = math.sqrt(batch_size * (1 - batch_size / num_examples))

    def cost(tile: int) -> float:
        """Return the expected cost of a batch's tiles, in rows."""
        below = (((tile * full + 0.5) - batch_size) / max(deviation, 1e-9) for full in itertools.count())
        chances = (0.5 * math.erfc(limit / math.sqrt(2.0)) for limit in below)  # of one more tile
        return sum(itertools.takewhile(lambda chance: chance > 1e-9, chances)) * (tile * copies + _TILE_COST)

    most = max(1, min(_DENSE_ROWS // copies, math.ceil(_LARGEST_SHARE * batch_size)))
    step = _ALIGNED // math.gcd(_ALIGNED, copies)
    return min(range(most - most % step, most // 2, -step), key=cost, default=most)


def _indices_of(drawn: Bool[Array, " examples"], capacity: int) -> Int[Array, " capacity"]:
    """Return the ascending indices of the first `capacity` true entries, then padding: a fast `jnp.nonzero`.

    The examples are bits of words. The rank of an index among the set bits determines its word, by the words' counts,
    and its place in the word: on a CPU, running sums over all examples take longer than drawing them.
    """
    flags = jnp.pad(drawn, (0, -len(drawn) % _WORD)).reshape(-1, _WORD).astype(jnp.uint32)
    words = jnp.sum(flags << jnp.arange(_WORD, dtype=jnp.uint32)[None], axis=1, dtype=jnp.uint32)
    counts = jax.lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts)
    ranks = jnp.arange(capacity)
    word_of_rank = jnp.minimum(jnp.searchsorted(ends, ranks, side="right"), len(words) - 1)
    place = _place_of_bit(words[word_of_rank], ranks - (ends - counts)[word_of_rank])
    return jnp.where(ranks < ends[-1], word_of_rank * _WORD + place, batching.PADDING).astype(jnp.int32)


def _place_of_bit(words: UInt32[Array, " count"], ranks: Int[Array, " count"]) -> Int[Array, " count"]:
    """Return the position of the set bit of each word with this many set bits below it, by bisection."""
    place = jnp.zeros_like(ranks)
    for half in (16, 8, 4, 2, 1):
        lower = words & jnp.uint32(2**half - 1)
        count = jax.lax.population_count(lower).astype(jnp.int32)
        above = ranks >= count
        words = jnp.where(above, words >> jnp.uint32(half), lower)
        ranks, place = jnp.where(above, ranks - count, ranks), jnp.where(above, place + half, place)
    return place


def refuse_overflow(order: Int[Array, "steps rows"], epoch: int) -> None:
    """Raise ConfigError if a batch of an epoch, from 0, exceeds the capacity."""
    batches = np.asarray(order)
    if (over := np.flatnonzero(batches[:, 0] == OVERFLOW)).size:
        raise ConfigError(
            f"train.batch_size: Poisson sampling drew more than {batches.shape[1]:,} examples for batch "
            f"{over[0] + 1} of epoch {epoch + 1}, which has a chance of at most {OVERFLOW_SHARE:g} times "
            f"train.privacy.delta; to drop examples would break the privacy guarantee: try another train.seed"
        )


def make_private_gradient(config: TrainConfig, model: Model, mechanism: Mechanism) -> Gradient:
    """Return the function that sums the clipped gradients of a batch, or of a device's share, without dividing the sum.

    Tiles of padding alone are skipped: examples precede the padding, and determine the number of tiles. The condition
    of the loop also states the largest number of tiles, with which the static cost is counted.
    """
    privacy, tile = config.privacy, mechanism.tile
    copies = privacy.augmentation_multiplicity
    clipping = Clipping(norm=privacy.example_clip_norm, copies=copies, label_smoothing=config.label_smoothing)

    def gradient_of_tile(shared: Shared, batch: Batch) -> tuple[BatchGradient, RowRecord]:
        copied = _copied(batch, copies)
        images, key = network_inputs(config, copied)
        clipped = clipped_grad_sum(model, shared.params, images, copied.labels, batch.mask, clipping, key=key)
        logits = clipped.logits[::copies]  # those of the first copy
        loss = losses.cross_entropy(logits, batch.labels, label_smoothing=config.label_smoothing)
        metrics, record = batch_metrics(batch, loss, logits, shared.count)
        return BatchGradient(**metrics, grads=clipped.grads, squared_norms=None), record

    def gradient(shared: Shared, batch: Batch) -> tuple[BatchGradient, RowRecord]:
        most = len(batch.indices) // tile
        tiles = batch.split(most)
        tile_shape, record_shape = jax.eval_shape(gradient_of_tile, shared, jax.tree.map(lambda leaf: leaf[0], tiles))
        used = -(-jnp.sum(batch.mask) // tile)
        records = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), record_shape)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tile_shape)

        def has_tile(carry: tuple[Array, BatchGradient, RowRecord]) -> Array:
            return (carry[0] < used) & (carry[0] < most)

        def add(carry: tuple[Array, BatchGradient, RowRecord]) -> tuple[Array, BatchGradient, RowRecord]:
            index, total, records = carry
            tile_gradient, record = gradient_of_tile(shared, jax.tree.map(lambda leaf: leaf[index], tiles))
            updated = jax.tree.map(lambda column, value: column.at[index].set(value), records, record)
            return index + 1, jax.tree.map(jnp.add, total, tile_gradient), updated

        _, total, records = jax.lax.while_loop(has_tile, add, (jnp.int32(0), zeros, records))
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
    leaves, structure = jax.tree.flatten(grads)
    noise = threefry.normals(key, sum(leaf.size for leaf in leaves))
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    parts = [noise[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
    noised = [(leaf + scale * part) / config.batch_size for leaf, part in zip(leaves, parts, strict=True)]
    return jax.tree.unflatten(structure, noised)


def _copied(batch: Batch, copies: int) -> Batch:
    """Repeat each row `copies` times, with different keys."""
    if copies == 1:
        return batch

    def keys(row_keys: Key[Array, " batch"] | None) -> Key[Array, " rows"] | None:
        return None if row_keys is None else jax.vmap(lambda key: jax.random.split(key, copies))(row_keys).reshape(-1)

    return Batch(
        images=jnp.repeat(batch.images, copies, axis=0),
        labels=jnp.repeat(batch.labels, copies),
        indices=jnp.repeat(batch.indices, copies),
        augmentation=keys(batch.augmentation),
        dropout=keys(batch.dropout),
    )
