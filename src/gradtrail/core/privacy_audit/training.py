"""A private training that records inner products with every canary in each step, and the noise of the first steps.

The steps are those of `train`, drawn, clipped, noised and applied by the same functions, with an `observe` that takes
inner products. Batches are drawn from the training split and all canaries; canaries whose coin is false are then left
out: as examples are drawn independently, this is Poisson sampling, at the same rate, from a training set that lacks
them. One compilation therefore serves all coins. Out of scope: scores from the products, see `scores`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from gradtrail.core import batching
from gradtrail.core.canaries import Canaries, with_canaries
from gradtrail.core.data import Split
from gradtrail.core.nn.layers import Layer
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.per_example import bounded_forward, forward_of, layer_metrics
from gradtrail.core.privacy_audit.scores import Products
from gradtrail.core.sharding import replicated, with_sharding
from gradtrail.core.train import loop
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.private import Mechanism, refuse_overflow
from gradtrail.core.train.step import StepRecord, TrainState, make_step, take
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

NOISY_STEPS = 8  # steps whose noise is recorded
_TILE = 256  # canaries that are processed together


@dataclass(frozen=True, kw_only=True)
class AuditTrace:
    """Record of an audited training."""

    products: Products  # products of every step and canary
    batches: Int[np.ndarray, "steps rows"]  # indices of the examples of every step, int32, padded
    rate: float  # probability that an example is in a batch
    # True for the examples of the training set: the split, and the canaries whose coin is true
    present: Bool[np.ndarray, " examples"]
    # noise of the first steps over its stated standard deviation, float32: the leaves of the parameters one after the
    # other
    noise: Float[np.ndarray, "noisy_steps parameters"]
    accuracy: float  # mean accuracy over the batches of the last epoch


@dataclass(frozen=True, kw_only=True)
class AuditProgram:
    """The compiled functions of an audited training."""

    training: loop.Program  # functions of the training
    rate: float  # probability that an example is in a batch
    deviation: float  # standard deviation of the noise in the optimizer's gradient
    init: CompiledFunction  # keys → state
    order: CompiledFunction  # (the state's keys, epoch) → the batches of the epoch
    # (state, examples, batches, images and labels of the canaries) → state, records with products and norms
    epoch: CompiledFunction
    noise: CompiledFunction  # (state, examples, batches of a few steps) → gradients without and with noise, by step

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        return [self.init, self.order, self.epoch, self.noise]

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of a training."""
        return self.training.config.epochs * self.training.steps_per_epoch


def compile_audit(
    config: TrainConfig,
    model: Model,
    num_examples: int,
    num_canaries: int,
    noise_multiplier: float,
    *,
    compiler: Compiler,
) -> AuditProgram:
    """Compile an audited training on a split of `num_examples` and canaries.

    Raises:
        ConfigError: a training cannot be made with these examples; one line that names the key.
    """
    slots = num_examples + num_canaries
    program = loop.make_program(config, model, slots, jax.local_devices(), noise_multiplier)
    num_steps = program.num_steps
    mechanism_of = functools.partial(Mechanism.for_training, config, model, slots, num_steps)
    step_of = functools.partial(make_step, config, model, num_steps, program.mesh)

    def epoch(
        state: TrainState, examples: Examples, order: Array, images: Array, labels: Array
    ) -> tuple[TrainState, StepRecord]:
        step = step_of(mechanism_of(noise_multiplier), functools.partial(_products, config, model, images, labels))

        def body(state: TrainState, indices: Array) -> tuple[TrainState, StepRecord]:
            return step(state, take(examples, indices))

        return jax.lax.scan(body, state, order)

    def noise(state: TrainState, examples: Examples, order: Array) -> PyTree:
        plain, noised = (
            step_of(mechanism_of(multiplier), lambda _, grads: _flat(grads)) for multiplier in (0.0, noise_multiplier)
        )

        def body(state: TrainState, indices: Array) -> tuple[TrainState, PyTree]:
            batch = take(examples, indices)
            (_, without), (state, with_noise) = plain(state, batch), noised(state, batch)
            return state, (without.observed, with_noise.observed)

        return jax.lax.scan(body, state, order)[1]

    everywhere = replicated(program.mesh)
    state = program.abstract_state
    index = jax.ShapeDtypeStruct((), jnp.int32)
    batches = jax.eval_shape(program.order, state.keys, index)
    few = jax.ShapeDtypeStruct((min(NOISY_STEPS, len(batches)), batches.shape[1]), jnp.int32)
    images = jax.ShapeDtypeStruct((num_canaries, *model.config.image_shape), jnp.uint8)
    labels = jax.ShapeDtypeStruct((num_canaries,), jnp.int32)

    def compiled(name: str, function: Callable[..., Any], *arguments: Any) -> CompiledFunction:
        return compiler.compile(name, function, *with_sharding(arguments, everywhere), out_shardings=everywhere)

    return AuditProgram(
        training=program,
        rate=config.batch_size / slots,
        deviation=noise_multiplier * config.privacy.example_clip_norm / config.batch_size,
        init=compiled("init", program.init, program.abstract_keys),
        order=compiled("order", program.order, state.keys, index),
        epoch=compiled("watched_epoch", epoch, state, program.examples, batches, images, labels),
        noise=compiled("noise", noise, state, program.examples, few),
    )


def run_audited_training(
    program: AuditProgram,
    train: Split,
    canaries: Canaries,
    coins: Bool[np.ndarray, " canaries"],
    *,
    keys: Key[Array, " purposes"],
    advance: Callable[[int], object] = lambda _: None,
) -> AuditTrace:
    """Train on `train` and the canaries whose coin is true.

    Args:
        program: functions compiled for this number of examples and canaries.
        canaries: canaries whose products are recorded, absent ones included.
        coins: True for the canaries to train on.
        advance: called with the number of steps after each epoch.

    Raises:
        ConfigError: a batch exceeds the capacity; one line.
        FloatingPointError: the training diverged; one line.
    """
    examples = loop.on_device(*with_canaries(train, canaries), program.training.mesh)
    present = np.concatenate([np.ones(len(train), bool), coins])
    everywhere = replicated(program.training.mesh)
    placed_canaries = jax.device_put((canaries.images, canaries.labels), everywhere)
    state = program.init(keys)
    batches: list[np.ndarray] = []
    observed: list[tuple[np.ndarray, np.ndarray]] = []
    accuracy = 0.0
    noise = np.zeros((0, 0), np.float32)
    for epoch in range(program.training.config.epochs):
        drawn = program.order(state.keys, np.int32(epoch))
        refuse_overflow(drawn, epoch)
        batches.append(drop_absent(np.asarray(drawn), present))
        order = jax.device_put(batches[-1], everywhere)
        if not epoch and program.deviation:
            few = jax.device_put(batches[-1][:NOISY_STEPS], everywhere)
            without, noised = program.noise(state, examples, few)
            noise = (np.asarray(noised) - np.asarray(without)) / np.float32(program.deviation)
        state, record = program.epoch(state, examples, order, *placed_canaries)
        observed.append(jax.device_get(record.observed))
        accuracy = float(np.mean(np.asarray(record.accuracy)))
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state.params))):
            raise FloatingPointError(
                f"a weight became infinite or NaN in epoch {epoch + 1} of an audited training; lower the learning rate "
                f"of train.optimizer"
            )
        advance(program.training.steps_per_epoch)
    products, signals = (np.concatenate([one[number] for one in observed]) for number in range(2))
    return AuditTrace(
        products=Products(products=products, signals=signals),
        batches=np.concatenate(batches),
        rate=program.rate,
        present=present,
        noise=noise,
        accuracy=accuracy,
    )


def drop_absent(
    order: Int[np.ndarray, "steps rows"], present: Bool[np.ndarray, " examples"]
) -> Int[np.ndarray, "steps rows"]:
    """Return batches without the examples that are absent, in the same order, with padding at their end."""
    stays = (order != batching.PADDING) & present[order]
    places = np.argsort(~stays, axis=1, kind="stable")
    return np.take_along_axis(np.where(stays, order, np.int32(batching.PADDING)), places, axis=1)


def _products(
    config: TrainConfig, model: Model, images: Array, labels: Array, params: Params, grads: Params
) -> tuple[Float[Array, "layers canaries"], Float[Array, "layers canaries"]]:
    """Return products and signals of `Products` for each layer and canary; `grads` goes to the optimizer."""
    clip = config.privacy.example_clip_norm
    directions = model.split_by_layer(jax.tree.map(lambda leaf: leaf[None] * (config.batch_size / clip), grads))

    def measure(layer: Layer, direction: PyTree, inputs: Array, cotangent: Array) -> tuple[Array, Array, Array]:
        centred = inputs - jnp.mean(inputs, axis=layer.batch_axis, keepdims=True)
        kernel_direction = {**direction, "bias": jnp.zeros_like(direction["bias"])}
        dots = layer.grad_dots(centred, cotangent, kernel_direction)[:, 0]
        bias_norms = layer.squared_grad_norms(jnp.zeros_like(inputs), cotangent)  # the gradient's only other part is 0
        signals = jnp.maximum(0.0, layer.squared_grad_norms(centred, cotangent) - bias_norms)
        return layer.squared_grad_norms(inputs, cotangent), signals, dots

    def tile_products(images: Array, labels: Array) -> tuple[Array, Array]:
        forward = bounded_forward(forward_of(model, params, images, labels, config.label_smoothing))
        by_layer, _ = layer_metrics(model, forward, measure, directions)
        squared, signals, dots = (jnp.stack(parts) for parts in zip(*by_layer.values(), strict=True))
        factors = jnp.minimum(1.0, clip / jnp.sqrt(jnp.maximum(jnp.sum(squared, axis=0), 1e-30))) / clip
        return dots * factors[None], signals * factors[None] ** 2

    tiles = -(-len(labels) // _TILE)
    size = -(-len(labels) // tiles)
    rows = jnp.arange(tiles * size).reshape(tiles, size) % len(labels)  # means count the padding
    by_tile = jax.lax.map(lambda tile: tile_products(images[tile], labels[tile]), rows)
    products, signals = (jnp.moveaxis(part, 1, 0).reshape(part.shape[1], -1)[:, : len(labels)] for part in by_tile)
    return products, signals


def _flat(grads: Params) -> Float[Array, " parameters"]:
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(grads)])
