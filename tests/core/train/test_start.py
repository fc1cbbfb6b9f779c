"""A training from weights against a loop by hand: what is frozen keeps its bits, what was taken has another rate."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exports import random_params
from factories import NUM_CLASSES, OPTIMIZERS, SHAPE, cases, random_split, seed_keys, train_config

from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model, by_path
from gradtrail.core.sharding import make_mesh
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.loop import on_device
from gradtrail.core.train.start import ReadStart
from gradtrail.core.train.step import StepRecord, TrainState, make_init, make_step, started_from, take

SPLIT = random_split(12)
ORDER = np.arange(12, dtype=np.int32).reshape(3, 4)
MESH = make_mesh(jax.local_devices()[:1])
CLIP_NORM, RATE, DECAY = 0.05, 0.25, 0.8
NETWORK = MLP(hidden=(5, 4), activation="tanh", dropout=0.0)
CONFIG = train_config(model=NETWORK, clip_norm=CLIP_NORM, average_decay=DECAY)
MODEL = Model(CONFIG.model_config(SHAPE, NUM_CLASSES))
HEAD = ("layers/2/kernel", "layers/2/bias")


def start(**fields: Any) -> ReadStart:
    return ReadStart(**{"weights": "w", "sha256": None, "freeze": (), "rate": 1.0, "drawn": HEAD, **fields})


def tensors() -> dict[str, np.ndarray]:
    """Values of all parameters but those of the last layer, with a zero of each sign."""
    values = {name: np.array(leaf) for name, leaf in by_path(random_params(MODEL, 1)).items() if name not in HEAD}
    for leaf in values.values():
        leaf.ravel()[:2] = (-0.0, 0.0)
    return values


def run(config: TrainConfig) -> tuple[list[TrainState], list[StepRecord]]:
    step = make_step(config, MODEL, len(ORDER), MESH)
    taken = jax.jit(lambda state, examples, indices: step(state, take(examples, indices)))
    examples = on_device(SPLIT.images, SPLIT.labels, MESH)
    states, records = [started_from(jax.jit(make_init(config, MODEL, len(ORDER)))(seed_keys(0)), tensors())], []
    for indices in ORDER:
        state, record = taken(states[-1], examples, indices)
        states.append(state)
        records.append(record)
    return states, records


def test_a_training_from_weights_is_the_plain_one_from_these() -> None:
    """Others are drawn as without; so is the moving average."""
    config = dataclasses.replace(CONFIG, start=start())
    (states, records), (plain, plain_records) = run(config), run(CONFIG)
    drawn = by_path(jax.jit(make_init(CONFIG, MODEL, len(ORDER)))(seed_keys(0)).params)
    for tree in (states[0].params, states[0].average):
        jax.tree.map(np.testing.assert_array_equal, by_path(tree), {**drawn, **tensors()})
    jax.tree.map(np.testing.assert_array_equal, states[-1].params, plain[-1].params)
    jax.tree.map(np.testing.assert_array_equal, records[-1].metrics, plain_records[-1].metrics)


@pytest.mark.parametrize("name", cases(OPTIMIZERS, fast=["adamw", "muon"]))
def test_frozen_layers_keep_their_bits_and_others_are_trained_as_without_them(name: str) -> None:
    """By hand: the gradient of the trained parameters alone, clipped, and a fraction of the updates of taken ones."""
    config = dataclasses.replace(CONFIG, optimizer=OPTIMIZERS[name], start=start(freeze=("layers/0",), rate=RATE))
    states, records = run(config)
    first = by_path(states[0].params)
    frozen = {path: leaf for path, leaf in first.items() if path.startswith("layers/0/")}
    trained = {path: leaf for path, leaf in first.items() if path not in frozen}
    rates = {path: 1.0 if path in HEAD else RATE for path in trained}
    optimizer = config.optimizer.make(config.schedule, len(ORDER))
    opt_state, average = jax.jit(optimizer.init)(trained), dict(trained)

    @jax.jit
    def by_hand(trained: dict, opt_state: Any, images: Any, labels: Any) -> tuple[dict, Any, Any]:
        def loss(trained: dict) -> Any:
            logits = MODEL.apply(MODEL.from_paths({**frozen, **trained}), images)
            return jnp.mean(config.loss.per_example(logits, labels))

        grads = jax.grad(loss)(trained)
        norm = optax.tree.norm(grads)
        clipped = jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, CLIP_NORM / norm), grads)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(clipped, opt_state, trained)
        return {path: leaf + rates[path] * updates[path] for path, leaf in trained.items()}, opt_state, norm

    for number, (indices, state, record) in enumerate(zip(ORDER, states[1:], records, strict=True)):
        trained, opt_state, norm = by_hand(trained, opt_state, SPLIT.images[indices], SPLIT.labels[indices])
        assert norm > CLIP_NORM
        np.testing.assert_allclose(record.metrics["grad_norm"], norm, rtol=1e-5)
        decay = min(DECAY, (1 + number) / (10 + number))
        average = {path: decay * average[path] + (1 - decay) * leaf for path, leaf in trained.items()}
        for params, expected in ((state.params, trained), (state.average, average)):
            leaves = by_path(params)
            for path in trained:
                np.testing.assert_allclose(leaves[path], expected[path], rtol=1e-4, atol=1e-6, err_msg=path)
            assert all(np.asarray(leaves[path]).tobytes() == tensors()[path].tobytes() for path in frozen)
    assert frozen["layers/0/kernel"].shape not in [leaf.shape for leaf in jax.tree.leaves(states[-1].opt_state)]
