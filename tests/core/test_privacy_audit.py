"""An audited training is the training: what is recorded equals its definition, and scores tell who was in batches."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import (
    NETWORKS,
    NUM_CLASSES,
    ROOT,
    SHAPE,
    initial_params,
    new_compiler,
    privacy_audit_config,
    random_split,
    train_config,
)
from gradient_oracles import per_example_grads, per_example_norm

from gradtrail.core.batching import PADDING
from gradtrail.core.config import ConfigError
from gradtrail.core.nn.inference import abstract_batch
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.nn.own import Own
from gradtrail.core.per_example import forward_of, layer_metrics
from gradtrail.core.privacy_audit import (
    AuditedTraining,
    AuditTrace,
    Canaries,
    _products,
    batch_scores,
    draw_canaries,
    drop_absent,
    fixed_order_scores,
    guess,
    log_ratios,
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
CANARIES = Canaries(images=random_split(30).images[24:], labels=random_split(30).labels[24:])
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


def test_dots_are_in_dark_places_and_differ_between_canaries() -> None:
    pixels = np.where(np.arange(20)[:, None] < 8, 0, np.random.default_rng(0).integers(1, 256, (50, 20, 10)))
    train = dataclasses.replace(random_split(50), images=pixels.astype(np.uint8))
    canaries = draw_canaries(privacy_audit_config(num_canaries=40), train, 3)
    assert canaries.images.shape == (40, 20, 10)
    assert set(np.unique(canaries.images)) == {0, 255}
    lit = canaries.images == 255
    assert (lit.sum(axis=(1, 2)) == 10).all()
    assert not lit[:, 8:].any()
    assert len(np.unique(lit.reshape(40, -1), axis=0)) == 40
    assert set(canaries.labels) == {0, 1, 2}


def test_mislabelled_canaries_have_wrong_labels() -> None:
    config = privacy_audit_config(canaries="mislabelled", num_canaries=24)
    canaries = draw_canaries(config, TRAIN, NUM_CLASSES)
    assert np.array_equal(canaries.images, TRAIN.images), "all of them, in the split's order"
    assert (canaries.labels != TRAIN.labels).all()
    assert set(canaries.labels) <= set(range(NUM_CLASSES))


def test_too_many_canaries_are_refused_by_the_name_of_the_key() -> None:
    config = privacy_audit_config(canaries="mislabelled", num_canaries=31)
    with pytest.raises(ConfigError, match=r"^privacy_audit\.num_canaries must be at most .* 30, got 31$"):
        draw_canaries(config, random_split(30), NUM_CLASSES)


def test_canaries_of_any_size_are_compared_in_little_memory() -> None:
    config = dataclasses.replace(CONFIG, model=NETWORKS["cnn"])
    model = Model(config.model_config((64, 64, 3), NUM_CLASSES))
    params = model.abstract_params()
    images, labels = abstract_batch(model, 256)
    products = functools.partial(_products, config, model)
    compiled = new_compiler().compile("products", products, images, labels, params, params)
    assert compiled.cost.temporary_bytes < 2**26


@functools.cache
def compiled() -> AuditedTraining:
    return AuditedTraining(CONFIG, MODEL, len(TRAIN), len(COINS), NOISE, compiler=new_compiler())


@functools.cache
def trained(*, seed: int = 5) -> AuditTrace:
    keys = keys_of(dataclasses.replace(SEEDS, noise=seed))
    return compiled().run(TRAIN, CANARIES, COINS, keys=keys)


def test_absent_examples_are_left_out_and_padding_stays_at_the_end() -> None:
    order = np.array([[0, 2, 3, 5, -1], [1, 3, 4, -1, -1]], np.int32)
    present = np.array([True, True, True, False, True, True])
    assert drop_absent(order, present).tolist() == [[0, 2, 5, -1, -1], [1, 4, -1, -1, -1]]


def test_canaries_whose_coin_is_false_are_in_no_batch_and_the_others_are() -> None:
    trace = trained()
    visits = np.bincount(trace.batches[trace.batches != PADDING], minlength=30)
    assert not visits[24:][~COINS].any()
    assert visits[24:][COINS].any()
    assert trace.present.tolist() == [True] * 24 + COINS.tolist()
    assert trace.rate == pytest.approx(10 / 30)
    assert len(trace.batches) == 6


def test_products_and_signals_equal_their_definition() -> None:
    """The sum over all layers of the product with the whole gradient, less that of inputs which all have in common."""
    trace = trained()
    images, labels = jnp.asarray(CANARIES.images), jnp.asarray(CANARIES.labels)
    state = compiled().init(keys_of(SEEDS))
    mechanism = Mechanism.for_training(CONFIG, MODEL, 30, 6, NOISE)
    mesh = make_mesh(jax.local_devices()[:1])
    step = jax.jit(make_step(CONFIG, MODEL, 6, mesh, mechanism, lambda _, grads: grads))
    examples = on_device(
        np.concatenate([TRAIN.images, CANARIES.images]), np.concatenate([TRAIN.labels, CANARIES.labels]), mesh
    )
    pixels = (CANARIES.images.reshape(6, -1) / 255).astype(np.float32)
    centred = pixels - pixels.mean(axis=0)
    for number, indices in enumerate(trace.batches[:2]):
        grads = per_example_grads(MODEL, state.params, images, labels, loss=CONFIG.loss)
        factor = np.minimum(1, CLIP / np.asarray(per_example_norm(grads))) / CLIP
        (layer,) = MODEL.split_by_layer(grads).values()
        directions = centred[:, :, None] * np.asarray(layer["bias"])[:, None, :] * factor[:, None, None]
        state, record = step(state, take(examples, jnp.asarray(indices)))
        (total,) = MODEL.split_by_layer(record.observed).values()
        dots = np.sum(directions * np.asarray(total["kernel"]) * CONFIG.batch_size / CLIP, axis=(1, 2))
        np.testing.assert_allclose(trace.products[number, 0], dots, rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(trace.signals[number, 0], np.sum(directions**2, axis=(1, 2)), rtol=2e-4)


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
    forward = forward_of(model, params, images, labels, CONFIG.loss)
    parts, _ = layer_metrics(model, forward, lambda _, __, *signals: signals)
    layers = model.layers()
    grads = {name: np.asarray(layers[name].grads(*part)) for name, part in parts.items()}
    norms = np.sqrt(sum(np.sum(rows**2, axis=1) for rows in grads.values()))
    factors = np.minimum(1, CLIP / norms) / CLIP
    for (name, (inputs, cotangent)), signal in zip(parts.items(), products(images, labels)[1], strict=True):
        centred = inputs - jnp.mean(inputs, axis=layers[name].batch_axis, keepdims=True)
        bias_size = layers[name].bias.size  # the bias comes first
        kernels = np.asarray(layers[name].grads(centred, cotangent))[:, bias_size:]
        np.testing.assert_allclose(signal, np.sum(kernels**2, axis=1) * factors**2, rtol=1e-4, atol=1e-9)


def test_signals_of_any_module_are_those_of_its_whole_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = dataclasses.replace(CONFIG, model=Own(file="raw", config=Own.config_class("raw")(hidden=(4,))))
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    params = initial_params(model)
    images, labels = jnp.asarray(CANARIES.images), jnp.asarray(CANARIES.labels)
    products, signals = jax.jit(functools.partial(_products, config, model))(images, labels, params, params)
    grads = per_example_grads(model, params, images, labels, loss=CONFIG.loss)
    factors = np.minimum(1, CLIP / per_example_norm(grads)) / CLIP
    rows = np.concatenate([leaf.reshape(len(labels), -1) for leaf in jax.tree.leaves(grads)], axis=1)
    direction = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)]) * CONFIG.batch_size / CLIP
    np.testing.assert_allclose(products, [rows @ direction * factors], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(signals, [np.sum(rows**2, axis=1) * factors**2], rtol=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_equal_canaries_have_no_signal_in_a_padded_tile(kind: Literal["mlp", "cnn"]) -> None:
    images, labels = (jnp.repeat(part[:1], 257, axis=0) for part in (CANARIES.images, CANARIES.labels))
    assert float(jnp.max(network(kind)[2](images, labels)[1])) < 1e-5


def test_recorded_noise_is_standard_normal() -> None:
    noise = np.concatenate([trained(seed=seed).noise for seed in range(12)])
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
    observe = make_step(CONFIG, MODEL, 3, mesh, mechanism, lambda _, grads: grads)
    observed, record = jax.jit(observe)(state, batch)
    assert plain[1].observed is None
    for one, other in zip(jax.tree.leaves(plain[0].params), jax.tree.leaves(observed.params), strict=True):
        assert np.array_equal(one, other)
    moved = jax.tree.map(lambda new, old: (old - new) / 0.5, observed.params, state.params)  # plain SGD
    for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(record.observed), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_a_training_that_diverges_is_one_line() -> None:
    def diverge(*arguments: object) -> tuple:
        state, record = compiled().epoch(*arguments)
        return dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)), record

    broken = copy.copy(compiled())
    broken.epoch = dataclasses.replace(compiled().epoch, call=diverge)
    with pytest.raises(FloatingPointError, match="infinite or NaN in epoch 1 of an audited training"):
        broken.run(TRAIN, CANARIES, COINS, keys=keys_of(SEEDS))


STEPS, MANY, RATE = 200, 400, 0.1
EPOCHS = 20
LABELS = np.arange(MANY, dtype=np.int32) % 4
IS_MEMBER = np.random.default_rng(1).integers(0, 2, MANY) == 1


def trace_of(present: np.ndarray) -> AuditTrace:
    """Return products of two layers: one has each canary's signal in unit noise, the other nothing but loud noise."""
    rng = np.random.default_rng(0)
    by_label = rng.normal(size=(STEPS, 1, 4))[..., LABELS]
    first = 0.8 * present[:, None] + np.sqrt(0.8) * rng.normal(size=(STEPS, 1, MANY)) + 30 * by_label
    second = 100 * rng.normal(size=(STEPS, 1, MANY))
    return dataclasses.replace(
        trained(),
        products=np.concatenate([first, second], axis=1).astype(np.float32),
        signals=np.broadcast_to(np.array([0.8, 0.2], np.float32)[None, :, None], (STEPS, 2, MANY)),
    )


def test_ratios_are_those_of_normal_densities() -> None:
    trace = trace_of(np.zeros((STEPS, MANY), bool))
    ratios = log_ratios(trace, np.zeros(MANY, np.int32))
    x = trace.products - np.median(trace.products, axis=2, keepdims=True)
    deviation = 1.4826 * np.median(np.abs(x), axis=2, keepdims=True)
    densities = np.square(x / deviation) / 2 - np.square((x - trace.signals) / deviation) / 2
    np.testing.assert_allclose(ratios, densities.sum(axis=1), rtol=1e-4, atol=1e-4)
    expected = np.log(0.9 + 0.1 * np.exp(ratios)).sum(axis=0)
    np.testing.assert_allclose(batch_scores(ratios, 0.1), expected, rtol=1e-6, atol=1e-9)


def share_right(scores: np.ndarray, share: float = 1.0) -> float:
    outcome = guess(scores, IS_MEMBER, share)
    return outcome.correct / outcome.guesses


def test_scores_separate_canaries_despite_labels_and_loud_layers() -> None:
    trace = trace_of((np.random.default_rng(2).uniform(size=(STEPS, MANY)) < RATE) & IS_MEMBER)
    scores = batch_scores(log_ratios(trace, LABELS), RATE)
    assert share_right(scores) > 0.7
    assert share_right(scores, 0.1) > share_right(scores)
    assert share_right(np.sum(trace.products, axis=(0, 1))) < 0.6, "the plain sum is lost in what is loud"


def test_guesses_are_chance_without_canaries_in_batches() -> None:
    ratios = log_ratios(trace_of(np.zeros((STEPS, MANY), bool)), LABELS)
    assert share_right(batch_scores(ratios, RATE)) == pytest.approx(0.5, abs=4 * 0.5 / MANY**0.5)


def test_fixed_order_score_detects_a_fixed_order() -> None:
    places = np.random.default_rng(3).integers(0, STEPS // EPOCHS, MANY)
    ratios = log_ratios(trace_of((np.arange(STEPS)[:, None] % (STEPS // EPOCHS) == places) & IS_MEMBER), LABELS)
    assert (
        share_right(fixed_order_scores(ratios, STEPS // EPOCHS)) > 0.9 > 0.85 > share_right(batch_scores(ratios, RATE))
    )


@pytest.mark.parametrize(("share", "guesses", "correct"), [(0.4, 2, 2), (0.8, 4, 2), (0.0, 0, 0), (1.0, 5, 2)])
def test_guesses_are_the_extreme_scores(share: float, guesses: int, correct: int) -> None:
    scores = np.array([5.0, -5.0, 1.0, -1.0, 0.0])
    outcome = guess(scores, np.array([True, False, False, True, False]), share)
    assert (outcome.canaries, outcome.guesses, outcome.correct) == (5, guesses, correct)
