"""Derivatives through a whole training are those of central differences of two trainings, in float64."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import (
    NUM_CLASSES,
    OPTIMIZERS,
    SHAPE,
    SMALL_CNN,
    cases,
    make_engine,
    new_compiler,
    private_config,
    random_split,
    run_training,
    seed_keys,
    train_config,
)
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array

from gradtrail.core.batching import normalize
from gradtrail.core.config import ConfigError
from gradtrail.core.gradients import metagradient
from gradtrail.core.gradients.metagradient import Metagradient, choose_length, compile_metagradient, floats_of
from gradtrail.core.nn.losses import cross_entropy
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model, Params, by_path
from gradtrail.core.train import optimizers
from gradtrail.core.train.augmentation import NO_AUGMENTATION
from gradtrail.core.train.changes import NO_CHANGES
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.start import ReadStart
from gradtrail.core.train.step import TrainState

SPLIT, TEST = random_split(10), random_split(14)[10:]  # batches of 4: the last one of an epoch holds 2 examples
MEMORY = 2**30
STEP = 2.0**-12  # of central differences; the weights and their sums are exact
SMOOTH = train_config(model=MLP(hidden=(5,), activation="gelu", dropout=0.0), epochs=3, clip_norm=None)
CLIPPED, NOISY, FROZEN = "adamw, clipped", "noisy, averaged", "frozen, averaged"
CONFIGS = {
    CLIPPED: dataclasses.replace(SMOOTH, optimizer=OPTIMIZERS["adamw"], clip_norm=0.3),
    NOISY: dataclasses.replace(
        SMOOTH,
        model=MLP(hidden=(5,), activation="silu", dropout=0.3),
        augmentation=dataclasses.replace(NO_AUGMENTATION, shift=1.0, rotation=10.0, scale=0.1, shear=5.0, cutout=1),
        average_decay=0.9,
    ),
    "momentum, accumulated": dataclasses.replace(SMOOTH, accumulation_steps=2),
    "batches of 3 and of 1": dataclasses.replace(SMOOTH, batch_size=3),
    "rmsprop": dataclasses.replace(SMOOTH, optimizer=OPTIMIZERS["rmsprop"]),
    FROZEN: dataclasses.replace(
        SMOOTH,
        optimizer=OPTIMIZERS["adamw"],
        average_decay=0.9,
        start=ReadStart(weights="w", sha256=None, freeze=("layers/0",), rate=0.3, drawn=("layers/1/bias",)),
    ),
    "convolutions": dataclasses.replace(SMOOTH, model=dataclasses.replace(SMALL_CNN, activation="gelu")),
}


WEIGHTS = {"layers/0/kernel": np.full((12, 5), 0.3), "layers/0/bias": np.arange(5.0), "layers/1/kernel": np.eye(5, 3)}


class WideModel(Model):
    """A network whose weights and images are float64."""

    def init(self, *, key: Any) -> Params:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), super().init(key=key))

    def apply(self, params: Params, images: Array, **options: Any) -> Array:
        pixels = normalize(images) if images.dtype == jnp.uint8 else images
        return super().apply(params, pixels.astype(jnp.float64), **options)


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Switch float64 on, with the norm of clipping too."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        patch.setattr(optimizers, "squared_norm", lambda tree: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))
        yield


def outputs(model: Model, params: Params) -> Array:
    """The margin of each test example, and their mean loss."""
    images, labels = jnp.asarray(TEST.images), jnp.asarray(TEST.labels)
    logits = model.apply(params, images)
    is_label = np.eye(NUM_CLASSES, dtype=bool)[TEST.labels]
    margins = logits[is_label] - jax.nn.logsumexp(jnp.where(is_label, -jnp.inf, logits), axis=1)
    return jnp.append(margins, jnp.mean(cross_entropy(logits, labels)))


def compiled(config: TrainConfig, kind: type[Model] = Model, memory_bytes: int = MEMORY) -> Metagradient:
    model = kind(config.model_config(SHAPE, NUM_CLASSES))
    function = functools.partial(outputs, model)
    metagradient = compile_metagradient(
        config, model, len(SPLIT), function, memory_bytes=memory_bytes, compiler=new_compiler()
    )
    return dataclasses.replace(metagradient, start=WEIGHTS if config.start.enabled else {})


plain = functools.cache(compiled)
wide = functools.cache(functools.partial(compiled, kind=WideModel))


def examples(changes: np.ndarray | None = None) -> Examples:
    changes = np.zeros((len(SPLIT), NUM_CLASSES)) if changes is None else changes
    columns = jax.device_put((SPLIT.images, SPLIT.labels, changes.astype(np.float32)))
    return Examples(images=columns[0], labels=columns[1], weight_changes=columns[2])


def trained(metagradient: Metagradient, changes: np.ndarray | None = None) -> TrainState:
    return metagradient.train(seed_keys(0), examples(changes))


def derivative_of(metagradient: Metagradient, advance: Any = lambda _: None) -> tuple[np.ndarray, np.ndarray]:
    return metagradient.derivative([*metagradient.states(seed_keys(0), examples())], examples(), advance)


@pytest.mark.parametrize("name", cases(CONFIGS, fast=(CLIPPED,)))
def test_derivative_is_that_of_central_differences(name: str) -> None:
    """By each example with each class as its label: with padding, over five parts, the last of which is not full."""
    config = CONFIGS[name]
    with float64():
        metagradient = wide(config)
        assert metagradient.steps_per_part == 2
        values, derivatives = derivative_of(metagradient)
        np.testing.assert_array_equal(values, metagradient.outputs(trained(metagradient))[0])
        expected = np.zeros_like(derivatives, np.float64)
        for row, label in np.ndindex(len(SPLIT), NUM_CLASSES):
            change = np.zeros((len(SPLIT), NUM_CLASSES))
            change[row, label] = STEP
            above, below = (metagradient.outputs(trained(metagradient, sign * change))[0] for sign in (1, -1))
            expected[:, row, label] = (np.asarray(above) - np.asarray(below)) / (2 * STEP)
        assert expected.dtype == np.float64 == values.dtype
    largest = np.abs(expected).max(axis=(1, 2), keepdims=True)
    assert (largest > 1e-3).all(), "else there is nothing to compare"
    np.testing.assert_allclose(derivatives / largest, expected / largest, atol=1e-5)


@functools.cache
def derivative() -> np.ndarray:
    return derivative_of(plain(CONFIGS[CLIPPED]))[1]


def test_rounding_to_float32_changes_little() -> None:
    """Without random numbers, which differ in float64."""
    with float64():
        expected = derivative_of(wide(CONFIGS[CLIPPED]))[1]
    largest = np.abs(expected).max(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(derivative() / largest, expected / largest, atol=1e-3)


def test_a_common_weight_of_all_examples_has_no_effect() -> None:
    """The loss of a batch is the mean over the weights of its examples."""
    by_label = derivative()[:, np.arange(len(SPLIT)), SPLIT.labels]
    assert (np.abs(by_label.sum(axis=1)) < 1e-4 * np.abs(by_label).sum(axis=1)).all()


@pytest.mark.parametrize("name", [CLIPPED, pytest.param(NOISY, marks=pytest.mark.slow)])
def test_training_in_parts_is_the_training(name: str) -> None:
    *_, chunk = run_training(*make_engine(CONFIGS[name], SPLIT))
    state = trained(plain(CONFIGS[name]))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), state.params, chunk.state.params)


def test_training_from_weights_and_its_derivative_begin_with_them() -> None:
    """Also with changes of the weights of examples; frozen layers end as they began."""
    metagradient, changes = plain(CONFIGS[FROZEN]), np.full((len(SPLIT), NUM_CLASSES), 0.5)
    for first, *_, last in (metagradient.states(seed_keys(0), examples(part)) for part in (None, changes)):
        for path, values in WEIGHTS.items():
            np.testing.assert_array_equal(by_path(first.params)[path], values.astype(np.float32))
            is_same = np.array_equal(by_path(last.evaluation_params)[path], values.astype(np.float32))
            assert is_same == path.startswith("layers/0"), path


def test_less_memory_means_shorter_parts_and_the_same_derivative() -> None:
    """A part of one step needs less than one of two, and the states before nine parts little."""
    config, advanced = CONFIGS[CLIPPED], list[int]()
    state_bytes = sum(leaf.nbytes for leaf in floats_of(trained(plain(config))))
    needed = plain(config).pull_back.cost.total_bytes + 5 * state_bytes
    small = compiled(config, memory_bytes=needed - 1)
    assert (plain(config).steps_per_part, small.steps_per_part) == (2, 1)
    _, result = derivative_of(small, advanced.append)
    np.testing.assert_allclose(result, derivative(), rtol=1e-3, atol=1e-5)
    assert advanced == [1] * 9


def test_too_little_memory_is_one_line_that_names_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metagradient, "choose_length", lambda *_: (2, 2**20 + 1))
    with pytest.raises(ConfigError) as caught:
        compiled(CONFIGS[CLIPPED], memory_bytes=2**20)
    least = "what_if.memory_mib must be at least 2 for 9 steps and 5 outputs, got 1"
    assert str(caught.value) == f"{least}; fewer of either, or a smaller network, need less"


@given(st.integers(1, 5000), st.integers(1, 10**6), st.integers(0, 10**8), st.integers(1, 10**7), st.integers(0, 10**7))
def test_length_of_a_part_that_needs_the_least_memory_is_found_by_three_compilations(
    num_steps: int, state: int, fixed: int, each: int, outputs: int
) -> None:
    """The states before all parts and the products of a part are traded; the oracle tries every length."""
    tried: list[int] = []

    def part_bytes(steps: int) -> int:
        tried.append(steps)
        return fixed + each * steps

    def needed(steps: int) -> int:
        return max(fixed + each * steps, outputs) + state * math.ceil(num_steps / steps)

    best = min(map(needed, range(1, num_steps + 1)))
    for budget in (best, best - 1):
        tried.clear()
        steps, memory = choose_length(part_bytes, num_steps, state, outputs, budget)
        assert memory == needed(steps) == best
        assert len(tried) == len({*tried}) <= 3


REFUSED = {
    "lion": (train_config(optimizer="lion"), "train.optimizer must be one of sgd, rmsprop, adam, adamw, got lion"),
    "muon": (train_config(optimizer="muon"), "train.optimizer must be one of sgd, rmsprop, adam, adamw, got muon"),
    "private": (
        private_config(),
        "train.privacy.enabled must be false: clipping and noise hide each example, got true",
    ),
    "scaled": (
        train_config(precision="float16"),
        "train.precision must be float32 or bfloat16: loss scaling has no derivative, got float16",
    ),
    "changed": (
        train_config(changes=dataclasses.replace(NO_CHANGES, omit=(3,), omit_seed=1)),
        "train.changes must be empty: effects of changes are predicted, got omit, omit_seed",
    ),
    "mixed": (
        train_config(augmentation=dataclasses.replace(NO_AUGMENTATION, mixup=0.2)),
        "train.augmentation.mixup must be 0: it mixes an example into others, got 0.2",
    ),
    "stopped early": (
        train_config(patience=2),
        "train.patience must be empty: the number of epochs has no derivative, got 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_training_without_a_derivative_is_refused(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        compiled(config)
    assert str(caught.value) == f"what_if: {message}"
