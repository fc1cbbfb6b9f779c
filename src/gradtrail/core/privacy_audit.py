"""A private training with canaries: how the steps of the training score each of them.

The steps are those of `train`, drawn, clipped, noised and applied by the same functions, with an `observe` that takes
inner products. Batches are drawn from the training split and all canaries; canaries whose coin is false are then left
out: as examples are drawn independently, this is Poisson sampling, at the same rate, from a training set that lacks
them. One compilation therefore serves all coins. Out of scope: bounds on epsilon, which need SciPy.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt8

from gradtrail.core import batching
from gradtrail.core.config import Bounds, PositiveFraction, Seed, config
from gradtrail.core.data import Split
from gradtrail.core.nn.layers import Layer
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.per_example import bounded_forward, forward_of, layer_metrics
from gradtrail.core.sharding import replicated, with_sharding
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.step import StepRecord, TrainState, make_step, take
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

_TILE = 256  # largest number of canaries that are processed together
_LARGEST_EXPONENT = 60.0
_DARK, _DOTS = 2 / 5, 1 / 20  # shares of all pixels

LayerScores = Float[np.ndarray, "steps layers canaries"]
Scores = Float[np.ndarray, " canaries"]
Coins = Bool[np.ndarray, " canaries"]


@config
class PrivacyAuditConfig:
    """The params of `make privacy-audit`, an audit of the private training of the section `train`."""

    seed: Seed  # seed of canaries, coins and trainings
    trainings: Annotated[int, Bounds(at_least=1, at_most=1000)]  # number of trainings, with different coins
    num_canaries: Annotated[int, Bounds(at_least=20, at_most=100_000)]  # about half are in each training set
    guess_share: PositiveFraction  # share of the canaries whose coins are guessed; fixed in advance
    confidence: Annotated[float, Bounds(at_least=0.5, below=1)]  # confidence level of the lower bound of epsilon


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Examples that a fair coin puts into a training set or not; an audit guesses the coins."""

    images: UInt8[np.ndarray, "canaries height width *channels"]
    labels: Int[np.ndarray, " canaries"]  # int32


def draw_canaries(config: PrivacyAuditConfig, train: Split, num_classes: int) -> Canaries:
    """Draw images with one pixel in twenty white, at random where the training images are darkest, and random labels.

    They have large gradients, almost orthogonal to each other and to those of real images. In color each channel of a
    pixel counts by itself.
    """
    rng, count = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(0,))), config.num_canaries
    brightness = np.mean(np.square(train.images, dtype=np.float32), axis=0).ravel()
    pixels = len(brightness)
    dark = np.argsort(brightness, kind="stable")[: max(2, round(_DARK * pixels))]
    places = rng.permuted(np.broadcast_to(dark, (count, len(dark))), axis=1)[:, : max(1, round(_DOTS * pixels))]
    images = np.zeros((count, pixels), np.uint8)
    np.put_along_axis(images, places, np.uint8(255), axis=1)
    labels = rng.integers(0, num_classes, count, dtype=np.int32)
    return Canaries(images=images.reshape(count, *train.images.shape[1:]), labels=labels)


class AuditedTraining:
    """A private training with canaries, compiled once for all coins."""

    def __init__(
        self,
        config: TrainConfig,
        model: Model,
        num_examples: int,
        num_canaries: int,
        noise_multiplier: float,
        *,
        compiler: Compiler,
    ) -> None:
        slots = num_examples + num_canaries
        training = loop.TrainingFunctions(config, model, slots, jax.local_devices(), noise_multiplier)

        def epoch(
            state: TrainState, examples: Examples, order: Array, images: Array, labels: Array
        ) -> tuple[TrainState, StepRecord]:
            """Train for an epoch; return the records with products and signals of the canaries."""
            observe = functools.partial(canary_products, config, model, images, labels)
            step = make_step(config, model, training.num_steps, training.mesh, training.mechanism, observe)
            return jax.lax.scan(lambda state, indices: step(state, take(examples, indices)), state, order)

        def compiled(name: str, function: Callable[..., Any], *arguments: Any) -> CompiledFunction:
            return compiler.compile(
                name, function, *with_sharding(arguments, self._everywhere), out_shardings=self._everywhere
            )

        self.config, self.num_steps, self._training = config, training.num_steps, training
        self.rate = config.batch_size / slots  # probability that an example is in a batch
        self._everywhere = replicated(training.mesh)
        batches = jax.ShapeDtypeStruct((training.steps_per_epoch, training.num_rows), jnp.int32)
        images = jax.ShapeDtypeStruct((num_canaries, *model.config.image_shape), jnp.uint8)
        labels = jax.ShapeDtypeStruct((num_canaries,), jnp.int32)
        self.init = compiled("init", training.init, training.abstract_keys)
        self.epoch = compiled(
            "watched_epoch", epoch, training.abstract_state, training.abstract_examples, batches, images, labels
        )
        self.functions = [self.init, self.epoch]

    def run(
        self,
        train: Split,
        canaries: Canaries,
        coins: Coins,
        *,
        keys: Key[Array, " purposes"],
        advance: Callable[[int], object] = lambda _: None,
    ) -> Scores:
        """Train on `train` and the canaries whose coin is true, and return the score of every canary.

        A score is the log-likelihood ratio of having been in each batch with the probability `rate`, or in none.

        Args:
            advance: called with the number of steps after each epoch.
        """
        images, labels = canaries.images, canaries.labels
        examples = loop.on_device(
            np.concatenate([train.images, images]), np.concatenate([train.labels, labels]), self._training.mesh
        )
        placed_canaries = jax.device_put((images, labels), self._everywhere)
        present = np.concatenate([np.ones(len(train), bool), coins])
        state, scores = self.init(keys), np.zeros(len(coins))
        for epoch in range(self.config.epochs):
            drawn = self._training.order(state.keys, np.int32(epoch))
            order = jax.device_put(drop_absent(np.asarray(drawn), present), self._everywhere)
            state, record = self.epoch(state, examples, order, *placed_canaries)
            if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state.params))):
                raise FloatingPointError(
                    f"a weight became infinite or NaN in epoch {epoch + 1} of an audited training; lower the learning "
                    f"rate of train.optimizer"
                )
            products, signals = jax.device_get(record.observed)
            scores += batch_scores(products, signals, labels, self.rate)
            advance(len(drawn))
        return scores


def drop_absent(
    order: Int[np.ndarray, "steps rows"], present: Bool[np.ndarray, " examples"]
) -> Int[np.ndarray, "steps rows"]:
    """Return batches without the examples that are absent, in the same order, with padding at their end."""
    stays = (order != batching.PADDING) & present[order]
    places = np.argsort(~stays, axis=1, kind="stable")
    return np.take_along_axis(np.where(stays, order, np.int32(batching.PADDING)), places, axis=1)


def canary_products(
    config: TrainConfig, model: Model, images: Array, labels: Array, params: Params, grads: Params
) -> tuple[Float[Array, "layers canaries"], Float[Array, "layers canaries"]]:
    """Return products and signals of every canary in each layer for one step; `grads` goes to the optimizer.

    Returns:
        products: inner products ⟨g, Σ + σ C z⟩ / C² of the canary's clipped gradient with the sum for the optimizer, in
            units of the clip norm C.
        signals: squares ‖g‖² / C², about what a canary in the batch adds to the product.
    """
    clip = config.privacy.example_clip_norm
    directions = model.split_by_layer(jax.tree.map(lambda leaf: leaf[None] * (config.batch_size / clip), grads))

    def measure(layer: Layer, direction: PyTree, inputs: Array, cotangent: Array) -> tuple[Array, Array]:
        return layer.squared_grad_norms(inputs, cotangent), layer.grad_dots(inputs, cotangent, direction)[:, 0]

    def tile_products(images: Array, labels: Array) -> tuple[Array, Array]:
        forward = bounded_forward(forward_of(model, params, images, labels, config.loss))
        by_layer, _ = layer_metrics(model, forward, measure, directions)
        squared, dots = (jnp.stack(parts) for parts in zip(*by_layer.values(), strict=True))
        factors = jnp.minimum(1.0, clip / jnp.sqrt(jnp.maximum(jnp.sum(squared, axis=0), 1e-30))) / clip
        return dots * factors[None], squared * factors[None] ** 2

    tiles = -(-len(labels) // model.tile_size(_TILE))
    size = -(-len(labels) // tiles)
    rows = jnp.arange(tiles * size).reshape(tiles, size) % len(labels)
    by_tile = jax.lax.map(lambda tile: tile_products(images[tile], labels[tile]), rows)
    products, signals = (jnp.moveaxis(part, 1, 0).reshape(part.shape[1], -1)[:, : len(labels)] for part in by_tile)
    return products, signals


def batch_scores(
    products: LayerScores, signals: LayerScores, labels: Int[np.ndarray, " canaries"], rate: float
) -> Scores:
    """Return the log-likelihood ratio of each canary being in each batch with probability `rate` or never.

    For one batch it is Σ over layers of (x a - a²/2) / s²: a product x is a more, its signal, where the canary is in
    the batch, and is taken as normal with the standard deviation s that the layer's products have in this step. What
    canaries of a label share carries no information about a coin, and is subtracted.
    """
    centred = products.astype(np.float64)
    for label in np.unique(labels):
        has_label = labels == label
        centred[..., has_label] -= np.median(centred[..., has_label], axis=-1, keepdims=True)
    deviation = 1.4826 * np.median(np.abs(centred), axis=-1, keepdims=True)  # most canaries are in few batches
    signals = signals.astype(np.float64)
    ratios = np.sum((centred * signals - signals**2 / 2) / np.maximum(deviation, 1e-6) ** 2, axis=1)
    ratios = np.clip(ratios, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return np.sum(np.log1p(rate * np.expm1(ratios)), axis=0)
