"""An audited training is the training: what is recorded equals its definition, and scores tell who was in batches."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import (
    NETWORKS,
    NUM_CLASSES,
    ROOT,
    SHAPE,
    new_compiler,
    params_on_device,
    privacy_audit_config,
    random_split,
    train_config,
)
from gradient_oracles import per_example_grads, per_example_norm

from gradtrail.core.batching import PADDING
from gradtrail.core.nn.inference import abstract_batch
from gradtrail.core.nn.models import Model
from gradtrail.core.nn.own import Own
from gradtrail.core.privacy_audit import (
    AuditedTraining,
    Canaries,
    batch_scores,
    canary_products,
    draw_canaries,
    drop_absent,
)
from gradtrail.core.sharding import make_mesh
from gradtrail.core.train.config import MemberSeeds
from gradtrail.core.train.dp_sgd import Mechanism
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import on_device
from gradtrail.core.train.optimizers import SGD
from gradtrail.core.train.privacy import NOT_PRIVATE
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
SEEDS = MemberSeeds(initialization=1, order=2, augmentation=3, dropout=4, noise=5)


def test_canaries_are_white_dots_in_dark_places_and_differ() -> None:
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


def test_canaries_of_any_size_are_compared_in_little_memory() -> None:
    config = dataclasses.replace(CONFIG, model=NETWORKS["cnn"])
    model = Model(config.model_config((64, 64, 3), NUM_CLASSES))
    params = model.abstract_params()
    images, labels = abstract_batch(model, 256)
    products = functools.partial(canary_products, config, model)
    compiled = new_compiler().compile("products", products, images, labels, params, params)
    assert compiled.cost.temporary_bytes < 2**26


def test_absent_examples_are_left_out_and_padding_stays_at_the_end() -> None:
    order = np.array([[0, 2, 3, 5, -1], [1, 3, 4, -1, -1]], np.int32)
    present = np.array([True, True, True, False, True, True])
    assert drop_absent(order, present).tolist() == [[0, 2, 5, -1, -1], [1, 4, -1, -1, -1]]


@functools.cache
def network(kind: Literal["linear", "cnn", "own"]) -> tuple[Model, Any, Callable[..., Any]]:
    """Return a network, its first parameters, and a function images, labels → products and signals."""
    own = Own(file="raw", config=Own.config_class("raw")(hidden=(4,))) if kind == "own" else None
    config = dataclasses.replace(CONFIG, model=own or NETWORKS[kind])
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    params = params_on_device(model)
    products = functools.partial(canary_products, config, model)
    return model, params, jax.jit(lambda images, labels: products(images, labels, params, params))


@functools.cache
def grads_of(model: Model) -> Callable[..., Any]:
    """Return a function of parameters: the gradients of the canaries."""
    return jax.jit(lambda params: per_example_grads(model, params, CANARIES.images, CANARIES.labels, loss=CONFIG.loss))


@pytest.fixture(scope="module")
def audited() -> AuditedTraining:
    model = Model(CONFIG.model_config(SHAPE, NUM_CLASSES))
    return AuditedTraining(CONFIG, model, len(TRAIN), len(COINS), NOISE, compiler=new_compiler())


def test_scores_are_those_of_the_steps_of_a_training_without_the_absent_canaries(audited: AuditedTraining) -> None:
    """Softmax regression step by step, which has one layer."""
    model, mesh = network("linear")[0], make_mesh(jax.local_devices()[:1])
    images = np.concatenate([TRAIN.images, CANARIES.images])
    labels = np.concatenate([TRAIN.labels, CANARIES.labels])
    examples, state = on_device(images, labels, mesh), audited.init(keys_of(SEEDS))
    mechanism = Mechanism.for_training(CONFIG, model, 30, audited.num_steps, NOISE)
    step = jax.jit(make_step(CONFIG, model, audited.num_steps, mesh, mechanism, lambda _, grads: grads))
    present = np.concatenate([np.ones(24, bool), COINS])
    expected = np.zeros(6)
    for epoch in range(CONFIG.epochs):
        products, signals = [], []
        for indices in drop_absent(np.asarray(audited._training.order(state.keys, np.int32(epoch))), present):
            assert not set(indices[indices != PADDING]) & set(24 + np.flatnonzero(~COINS))
            grads = grads_of(model)(state.params)
            factors = np.minimum(1, CLIP / np.asarray(per_example_norm(grads))) / CLIP
            state, record = step(state, take(examples, jnp.asarray(indices)))
            pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(record.observed), strict=True)
            dots = sum(np.tensordot(rows, total, total.ndim) for rows, total in pairs)
            products.append([dots * factors * CONFIG.batch_size / CLIP])
            signals.append([np.square(per_example_norm(grads) * factors)])
        expected += batch_scores(np.array(products), np.array(signals), CANARIES.labels, audited.rate)
    scores = audited.run(TRAIN, CANARIES, COINS, keys=keys_of(SEEDS))
    np.testing.assert_allclose(scores, expected, rtol=1e-2, atol=1e-3)
    assert audited.rate == pytest.approx(10 / 30)


@pytest.mark.parametrize("kind", ["cnn", "own"])
def test_products_are_those_with_the_clipped_gradients_in_each_layer(
    kind: Literal["cnn", "own"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    model, params, products = network(kind)
    grads = grads_of(model)(params)
    factors = np.minimum(1, CLIP / per_example_norm(grads)) / CLIP
    tiled = [np.resize(part, (300, *part.shape[1:])) for part in (CANARIES.images, CANARIES.labels)]  # two tiles
    dots, signals = products(*tiled)
    layers = zip(
        model.split_by_layer(grads).values(), model.split_by_layer(params).values(), dots, signals, strict=True
    )
    for of_examples, of_sum, layer_dots, layer_signals in layers:
        rows = np.concatenate([leaf.reshape(6, -1) for leaf in jax.tree.leaves(of_examples)], axis=1)
        direction = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(of_sum)]) * CONFIG.batch_size / CLIP
        np.testing.assert_allclose(layer_dots, np.resize(rows @ direction * factors, 300), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(layer_signals, np.resize(np.sum(rows**2, axis=1) * factors**2, 300), rtol=1e-3)


def test_observing_changes_no_bit_of_a_step() -> None:
    model, mesh = network("linear")[0], make_mesh(jax.local_devices()[:1])
    mechanism = Mechanism.for_training(CONFIG, model, 24, 3, NOISE)
    state = jax.jit(make_init(CONFIG, model, 3))(keys_of(SEEDS))
    examples = on_device(TRAIN.images, TRAIN.labels, mesh)
    indices = jnp.asarray(
        np.where(np.arange(mechanism.capacity) < 9, np.arange(mechanism.capacity), PADDING), jnp.int32
    )
    batch = take(examples, indices)
    plain = jax.jit(make_step(CONFIG, model, 3, mesh, mechanism))(state, batch)
    observe = make_step(CONFIG, model, 3, mesh, mechanism, lambda _, grads: grads)
    observed, record = jax.jit(observe)(state, batch)
    assert plain[1].observed is None
    for one, other in zip(jax.tree.leaves(plain[0].params), jax.tree.leaves(observed.params), strict=True):
        assert np.array_equal(one, other)
    moved = jax.tree.map(lambda new, old: (old - new) / 0.5, observed.params, state.params)  # plain SGD
    for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(record.observed), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_a_training_that_diverges_is_one_line(audited: AuditedTraining) -> None:
    def diverge(*arguments: object) -> tuple:
        state, record = audited.epoch(*arguments)
        return dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)), record

    broken = copy.copy(audited)
    broken.epoch = dataclasses.replace(audited.epoch, call=diverge)
    with pytest.raises(FloatingPointError, match="infinite or NaN in epoch 1 of an audited training"):
        broken.run(TRAIN, CANARIES, COINS, keys=keys_of(SEEDS))


STEPS, MANY, RATE = 200, 400, 0.1
LABELS = np.arange(MANY, dtype=np.int32) % 4
IS_MEMBER = np.random.default_rng(1).integers(0, 2, MANY) == 1


def two_layers(present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return products and signals: each canary's signal in unit noise, and a layer of nothing but loud noise."""
    rng = np.random.default_rng(0)
    by_label = rng.normal(size=(STEPS, 1, 4))[..., LABELS]
    first = 0.8 * present[:, None] + np.sqrt(0.8) * rng.normal(size=(STEPS, 1, MANY)) + 30 * by_label
    second = 100 * rng.normal(size=(STEPS, 1, MANY))
    signals = np.broadcast_to(np.array([0.8, 0.2], np.float32)[None, :, None], (STEPS, 2, MANY))
    return np.concatenate([first, second], axis=1).astype(np.float32), signals


def test_scores_are_ratios_of_normal_densities() -> None:
    products, signals = two_layers(np.zeros((STEPS, MANY), bool))
    x = products - np.median(products, axis=2, keepdims=True)
    deviation = 1.4826 * np.median(np.abs(x), axis=2, keepdims=True)
    ratios = np.sum(np.square(x / deviation) / 2 - np.square((x - signals) / deviation) / 2, axis=1)
    expected = np.log(0.9 + 0.1 * np.exp(ratios)).sum(axis=0)
    scores = batch_scores(products, signals, np.zeros(MANY, np.int32), 0.1)
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-3)


def share_right(scores: np.ndarray) -> float:
    """Return the share of correct guesses, that half of the canaries with the larger scores are members."""
    return float(np.mean((scores > np.median(scores)) == IS_MEMBER))


def test_scores_separate_canaries_despite_labels_and_loud_layers() -> None:
    products, signals = two_layers((np.random.default_rng(2).uniform(size=(STEPS, MANY)) < RATE) & IS_MEMBER)
    assert share_right(batch_scores(products, signals, LABELS, RATE)) > 0.7
    assert share_right(np.sum(products, axis=(0, 1))) < 0.6, "the plain sum is lost in what is loud"
    in_no_batch, signals = two_layers(np.zeros((STEPS, MANY), bool))
    assert share_right(batch_scores(in_no_batch, signals, LABELS, RATE)) == pytest.approx(0.5, abs=2 / MANY**0.5)
