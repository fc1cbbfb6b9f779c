"""A watched training is the training: what is taken of each step equals its definition, and nothing else changes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import per_example_grads, per_example_norm
from factories import NETWORKS, NUM_CLASSES, SHAPE, new_compiler, random_split, train_config

from gradtrail.core.batching import PADDING
from gradtrail.core.canaries import Canaries
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.per_example import signals
from gradtrail.core.privacy_audit.training import (
    AuditProgram,
    AuditTrace,
    _products,
    compile_audit,
    drop_absent,
    run_audited_training,
)
from gradtrail.core.sharding import make_mesh
from gradtrail.core.train.config import MemberSeeds
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import on_device
from gradtrail.core.train.optimizers import SGD
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.train.private import Mechanism
from gradtrail.core.train.step import make_init, make_step, take

NOISE, CLIP = 0.5, 0.3
TRAIN = random_split(24)
OTHERS = random_split(30)
CANARIES = Canaries(images=OTHERS.images[24:], labels=OTHERS.labels[24:])
COINS = np.array([True, False, True, True, False, False])
CONFIG = train_config(
    model="linear",
    batch_size=10,
    optimizer=SGD(learning_rate=0.5, momentum=0.0, nesterov=False),
    schedule="constant",
    clip_norm=None,
    privacy=dataclasses.replace(NOT_PRIVATE, enabled=True, example_clip_norm=CLIP),
)
MODEL = Model(CONFIG.model_config(SHAPE, NUM_CLASSES))
SEEDS = MemberSeeds(initialization=1, order=2, augmentation=3, dropout=4, noise=5)


@functools.cache
def compiled() -> AuditProgram:
    return compile_audit(CONFIG, MODEL, len(TRAIN), len(CANARIES), NOISE, compiler=new_compiler())


@functools.cache
def watched(*, seed: int = 5) -> AuditTrace:
    keys = keys_of(dataclasses.replace(SEEDS, noise=seed))
    return run_audited_training(compiled(), TRAIN, CANARIES, COINS, keys=keys)


def test_absent_examples_are_left_out_and_padding_stays_at_the_end() -> None:
    order = np.array([[0, 2, 3, 5, -1], [1, 3, 4, -1, -1]], np.int32)
    present = np.array([True, True, True, False, True, True])
    assert drop_absent(order, present).tolist() == [[0, 2, 5, -1, -1], [1, 4, -1, -1, -1]]


def test_canaries_whose_coin_is_false_are_in_no_batch_and_the_others_are() -> None:
    result = watched()
    visits = np.bincount(result.batches[result.batches != PADDING], minlength=30)
    assert (visits[24:] > 0).tolist() == COINS.tolist()
    assert result.present.tolist() == [True] * 24 + COINS.tolist()
    assert result.rate == pytest.approx(10 / 30)
    assert len(result.batches) == 6


def test_products_and_signals_equal_their_definition() -> None:
    """The sum over all layers of the product with the whole gradient, less that of inputs which all have in common."""
    result = watched()
    images, labels = jnp.asarray(CANARIES.images), jnp.asarray(CANARIES.labels)
    state = compiled().init(keys_of(SEEDS))
    mechanism = Mechanism.for_training(CONFIG, MODEL, 30, 6, NOISE)
    mesh = make_mesh(jax.local_devices()[:1])
    step = jax.jit(make_step(CONFIG, MODEL, 6, mesh, mechanism, lambda _, grads: grads))
    examples = on_device(
        np.concatenate([TRAIN.images, CANARIES.images]), np.concatenate([TRAIN.labels, CANARIES.labels]), mesh
    )
    for number, indices in enumerate(result.batches[:2]):
        params = state.params
        grads = per_example_grads(MODEL, params, images, labels, label_smoothing=CONFIG.label_smoothing)
        factor = np.minimum(1, CLIP / np.asarray(per_example_norm(grads))) / CLIP
        pixels = (CANARIES.images.reshape(6, -1) / 255).astype(np.float32)
        own_result = pixels - pixels.mean(axis=0)
        (layer,) = MODEL.split_by_layer(grads).values()
        cotangent = np.asarray(layer["bias"])
        directions = own_result[:, :, None] * cotangent[:, None, :] * factor[:, None, None]
        state, record = step(state, take(examples, jnp.asarray(indices)))
        (inputs,) = MODEL.split_by_layer(record.observed).values()
        total = np.asarray(inputs["kernel"]) * CONFIG.batch_size / CLIP
        np.testing.assert_allclose(
            result.products.products[number, 0], np.sum(directions * total, axis=(1, 2)), rtol=2e-4, atol=1e-5
        )
        np.testing.assert_allclose(result.products.signals[number, 0], np.sum(directions**2, axis=(1, 2)), rtol=2e-4)


@functools.cache
def network(kind: Literal["mlp", "cnn"]) -> tuple[Model, Params, Callable[..., tuple[jax.Array, jax.Array]]]:
    """Return a network, its first parameters, and a function images, labels → products and signals."""
    config = dataclasses.replace(CONFIG, model=NETWORKS[kind])
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    params = jax.jit(make_init(config, model, 1))(keys_of(SEEDS)).params
    products = functools.partial(_products, config, model)
    return model, params, jax.jit(lambda images, labels: products(images, labels, params, params))


def test_signals_of_hidden_layers_leave_the_bias_out() -> None:
    model, params, products = network("mlp")
    images, labels = jnp.asarray(CANARIES.images), jnp.asarray(CANARIES.labels)
    parts = signals(model, params, images, labels, label_smoothing=CONFIG.label_smoothing)
    layers = model.layers()
    grads = {name: np.asarray(layers[name].grads(*part)) for name, part in parts.items()}
    norms = np.sqrt(sum(np.sum(rows**2, axis=1) for rows in grads.values()))
    factors = np.minimum(1, CLIP / norms) / CLIP
    for (name, (inputs, cotangent)), signal in zip(parts.items(), products(images, labels)[1], strict=True):
        own_result = inputs - jnp.mean(inputs, axis=layers[name].batch_axis, keepdims=True)
        kernels = np.asarray(layers[name].grads(own_result, cotangent))[
            :, layers[name].bias.size :
        ]  # the bias comes first
        np.testing.assert_allclose(signal, np.sum(kernels**2, axis=1) * factors**2, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_equal_canaries_have_no_signal_in_a_padded_tile(kind: Literal["mlp", "cnn"]) -> None:
    images, labels = (jnp.repeat(part[:1], 257, axis=0) for part in (CANARIES.images, CANARIES.labels))
    assert float(jnp.max(network(kind)[2](images, labels)[1])) < 1e-5


def test_recorded_noise_is_standard_normal() -> None:
    noise = np.concatenate([watched(seed=seed).noise for seed in range(12)])
    assert noise.shape == (12 * 3, 39), "of the first epoch's steps"
    assert noise.std() == pytest.approx(1, abs=4 / (2 * noise.size) ** 0.5)


def test_observing_changes_no_bit_of_a_step() -> None:
    mesh = make_mesh(jax.local_devices()[:1])
    mechanism = Mechanism.for_training(CONFIG, MODEL, 24, 3, NOISE)
    state = jax.jit(make_init(CONFIG, MODEL, 3))(keys_of(SEEDS))
    examples = on_device(TRAIN.images, TRAIN.labels, mesh)
    indices = jnp.where(jnp.arange(mechanism.capacity) < 9, jnp.arange(mechanism.capacity), PADDING)
    batch = take(examples, indices)
    plain = jax.jit(make_step(CONFIG, MODEL, 3, mesh, mechanism))(state, batch)
    observed, record = jax.jit(make_step(CONFIG, MODEL, 3, mesh, mechanism, lambda _, grads: grads))(state, batch)
    assert plain[1].observed is None
    for one, other in zip(jax.tree.leaves(plain[0].params), jax.tree.leaves(observed.params), strict=True):
        assert np.array_equal(one, other)
    moved = jax.tree.map(lambda new, old: (old - new) / 0.5, observed.params, state.params)  # plain SGD
    for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(record.observed), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_a_training_that_diverges_is_one_line() -> None:
    broken = dataclasses.replace(compiled().epoch, call=lambda *arguments: _nan(compiled().epoch(*arguments)))
    with pytest.raises(FloatingPointError, match="infinite or NaN in epoch 1 of an audited training"):
        run_audited_training(dataclasses.replace(compiled(), epoch=broken), TRAIN, CANARIES, COINS, keys=keys_of(SEEDS))


def _nan(result: tuple) -> tuple:
    state, record = result
    return dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)), record
