"""One step: parts make up the whole batch, low precision keeps float32's course, what is not finite changes nothing.

A step is compiled by itself here, fast rather than to be fast; `test_training` has the loop around it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from factories import NUM_CLASSES, OPTIMIZERS, SCHEDULES, SMALL_CNN, cases, random_split, seed_keys, train_config

from gradtrail.core.batching import PADDING
from gradtrail.core.data import Split
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.losses import CrossEntropy
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model
from gradtrail.core.sharding import make_mesh, replicated
from gradtrail.core.train.augmentation import NO_AUGMENTATION, augment
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.loop import on_device
from gradtrail.core.train.loss_scaling import LossScalingConfig
from gradtrail.core.train.optimizers import SGD
from gradtrail.core.train.schedules import learning_rate
from gradtrail.core.train.step import StepRecord, TrainState, make_init, make_step, take

Run: TypeAlias = tuple[list[TrainState], StepRecord]  # the states, the initial one first, and the stacked records
SPLIT = random_split(10)
ORDER = np.array([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, PADDING, PADDING]] * 2, np.int32)
PLAIN = {
    "optimizer": SGD(learning_rate=0.1, momentum=0.0, nesterov=False),
    "clip_norm": None,
}  # moves by rate × gradient
LINEAR = train_config(**PLAIN, model="linear", schedule="constant")
NOISY = train_config(
    model=MLP(hidden=(5,), activation="relu", dropout=0.5),
    augmentation=dataclasses.replace(
        NO_AUGMENTATION,
        shift=1.0,
        rotation=10.0,
        scale=0.1,
        shear=5.0,
        cutout=1,
        flip=True,
        crop=1,
        brightness=0.2,
        contrast=0.2,
        mixup=1.0,
    ),
    schedule="constant",
    average_decay=0.3,  # from the fourth step on; before, the stride is longer
)
OVERFLOWING = train_config(
    **PLAIN,
    schedule="linear",
    precision="float16",
    average_decay=0.9,
    loss_scaling=LossScalingConfig(
        initial=2.0**127, growth_factor=2.0, backoff_factor=2.0**-40, growth_interval=2, minimum=1.0
    ),
)
MESH = make_mesh(jax.local_devices()[:1])


@functools.cache
def compiled(
    config: TrainConfig, num_steps: int, shape: tuple[int, int], num_classes: int
) -> tuple[Callable[..., TrainState], Callable[..., Any]]:
    model = Model(config.model_config(shape, num_classes))
    step = make_step(config, model, num_steps, MESH)
    taken = jax.jit(lambda state, examples, indices: step(state, take(examples, indices)))
    return jax.jit(make_init(config, model, num_steps)), taken


def run(
    config: TrainConfig,
    order: np.ndarray = ORDER,
    split: Split = SPLIT,
    *,
    num_classes: int = NUM_CLASSES,
) -> Run:
    """Make a step for each row of `order`."""
    init, step = compiled(config, len(order), split.images.shape[1:], num_classes)
    examples = on_device(split.images, split.labels, MESH)
    states, records = [jax.device_put(init(seed_keys(0)), replicated(MESH))], []  # else step two is compiled anew
    for indices in order:
        state, record = step(states[-1], examples, indices)
        states.append(state)
        records.append(record)
    return states, jax.tree.map(lambda *leaves: np.stack(leaves), *records)


def norm_of_difference(new: Any, old: Any) -> float:
    squares = jax.tree.map(lambda one, other: np.sum(np.square(np.asarray(one) - np.asarray(other))), new, old)
    return float(np.sqrt(sum(jax.tree.leaves(squares))))


def same_bits(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


# Parts


def test_gradient_and_records_in_parts_are_those_of_the_whole_batch() -> None:
    """Under dropout and augmentation as well: each row draws the same in whichever part it is."""
    (states, whole), (parts, in_parts) = run(NOISY), run(dataclasses.replace(NOISY, accumulation_steps=2))
    for name in ("loss", "cross_entropy", "accuracy", "grad_norm", "learning_rate"):
        np.testing.assert_allclose(in_parts.metrics[name], whole.metrics[name], rtol=1e-5, err_msg=name)
    for result, expected in zip(parts, states, strict=True):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), result.params, expected.params
        )
    assert norm_of_difference(states[-1].params, states[0].params) > 0.1, "else there is nothing to compare"
    np.testing.assert_array_equal(whole.rows.indices, ORDER)
    np.testing.assert_array_equal(in_parts.rows.indices, ORDER)
    np.testing.assert_allclose(in_parts.rows.probability, whole.rows.probability, rtol=1e-4)
    np.testing.assert_array_equal(in_parts.rows.correct, whole.rows.correct)
    counted = ORDER != PADDING
    accuracy = [row[mask].mean() for row, mask in zip(whole.rows.correct, counted, strict=True)]
    np.testing.assert_allclose(whole.metrics["accuracy"], accuracy, rtol=1e-6)
    cross_entropy = [-np.log(row[mask]).mean() for row, mask in zip(whole.rows.probability, counted, strict=True)]
    np.testing.assert_allclose(whole.metrics["cross_entropy"], cross_entropy, rtol=1e-5)
    assert not np.allclose(whole.metrics["loss"], cross_entropy, rtol=1e-3), "the loss has the label smoothing"


def test_clipped_is_whether_the_norm_of_the_gradient_exceeds_the_limit() -> None:
    _, unclipped = run(LINEAR)
    limit = float(np.median(unclipped.metrics["grad_norm"]))
    _, records = run(dataclasses.replace(LINEAR, clip_norm=limit))
    above = records.metrics["grad_norm"] > limit
    assert 0 < np.mean(above) < 1, "else there is nothing to compare"
    np.testing.assert_array_equal(records.metrics["clipped"], above)
    assert "clipped" not in unclipped.metrics


def test_part_norm_is_the_root_mean_square_over_parts() -> None:
    """A plain step from the same weights on each part alone moves by its mean gradient."""
    config = dataclasses.replace(LINEAR, accumulation_steps=2)
    _, records = run(config, ORDER[:1])
    alone = dataclasses.replace(config, accumulation_steps=1, batch_size=2)
    norms = [run(alone, part[None])[1].metrics["grad_norm"][0] for part in ORDER[0].reshape(2, 2)]
    np.testing.assert_allclose(records.metrics["part_grad_norm"], [np.sqrt(np.mean(np.square(norms)))], rtol=1e-5)


def test_tiles_change_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(NOISY, model=SMALL_CNN)
    whole = run(config)
    monkeypatch.setattr(Model, "tile_size", lambda *_: 1)
    compiled.cache_clear()
    in_tiles = run(config)
    compiled.cache_clear()
    assert not same_bits(in_tiles[0][-1].params, whole[0][-1].params), "else there were no tiles"
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), in_tiles[1], whole[1])
    for result, expected in zip(in_tiles[0], whole[0], strict=True):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), result.params, expected.params
        )


# The moving average


def test_the_average_moves_towards_the_parameters_in_strides_that_shorten() -> None:
    states, _ = run(NOISY)
    average = jax.device_get(states[0].params)
    for number, state in enumerate(states[1:]):
        decay = min(0.3, (1 + number) / (10 + number))
        average = jax.tree.map(lambda old, new, d=decay: d * old + (1 - d) * np.asarray(new), average, state.params)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), state.average, average)
    assert norm_of_difference(states[-1].average, states[-1].params) > 1e-3


# Dropout and augmentation


@pytest.mark.parametrize("part", ["model", "augmentation"])  # of which the model has the dropout
def test_random_draws_differ_between_steps_and_rows(part: str) -> None:
    """At a rate so small that no weight moves, the loss of one batch changes by what is drawn alone."""
    still = train_config(schedule="constant", optimizer=SGD(learning_rate=1e-30, momentum=0.0, nesterov=False))
    config = dataclasses.replace(still, **{part: getattr(NOISY, part)})
    batch = np.array([0, 0, 0, 0], np.int32)
    states, records = run(config, np.tile(batch, (3, 1)))
    np.testing.assert_allclose(
        *(state.params["layers"][0]["kernel"] for state in (states[0], states[-1])), rtol=0, atol=1e-20
    )
    assert len(set(records.metrics["loss"].tolist())) == 3
    orders = [np.tile(np.where(np.arange(4) == row, batch, PADDING), (3, 1)) for row in range(4)]
    alone = [run(config, order)[1].metrics["loss"][0] for order in orders]
    assert len(set(alone)) > 1, "one row draws what another does"
    np.testing.assert_allclose(np.mean(alone), records.metrics["loss"][0], rtol=1e-5)


def test_mixup_mixes_images_and_losses_with_those_of_the_row_before() -> None:
    """Of a linear network's steps, whose gradients NumPy has; the last batch has two rows and padding."""
    augmentation = dataclasses.replace(NO_AUGMENTATION, crop=1, mixup=1.0)
    states, records = run(dataclasses.replace(LINEAR, augmentation=augmentation))
    assert isinstance(LINEAR.loss, CrossEntropy)
    smoothing, images = LINEAR.loss.label_smoothing, SPLIT.images / np.float32(255)
    targets = (1 - smoothing) * np.eye(NUM_CLASSES)[SPLIT.labels] + smoothing / NUM_CLASSES
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        step_key = jax.random.fold_in(jax.random.fold_in(before.keys.augmentation, 2**32 - 1), number)
        rows = ORDER[number][ORDER[number] != PADDING]
        keys = jax.random.split(step_key, 4)[: len(rows)]
        share = np.array([jax.random.beta(jax.random.fold_in(key, 1), 1.0, 1.0) for key in keys])[:, None]
        share = np.maximum(share, 1 - share)
        pictures, partners = (
            np.asarray(
                augment(
                    jnp.asarray(images[chosen]),
                    augmentation,
                    key=jax.vmap(jax.random.fold_in, (0, None))(keys, purpose),
                )
            )
            for chosen, purpose in ((rows, 0), (np.roll(rows, 1), 2))
        )
        inputs = (share * pictures.reshape(len(rows), -1) + (1 - share) * partners.reshape(len(rows), -1)).astype(float)
        target = share * targets[rows] + (1 - share) * targets[np.roll(rows, 1)]
        layer = jax.device_get(before.params["layers"][0])
        logits = inputs @ layer["kernel"] + layer["bias"]
        log_probabilities = logits - scipy.special.logsumexp(logits, axis=1, keepdims=True)
        error = (np.exp(log_probabilities) - target) / len(rows)
        moved = jax.tree.map(lambda new, old: (new - old) / -0.1, jax.device_get(after.params["layers"][0]), layer)
        np.testing.assert_allclose(moved["kernel"], inputs.T @ error, atol=1e-5)
        np.testing.assert_allclose(moved["bias"], error.sum(axis=0), atol=1e-5)
        loss = -np.sum(target * log_probabilities) / len(rows)
        np.testing.assert_allclose(records.metrics["loss"][number], loss, rtol=1e-5)
        of_label = np.exp(log_probabilities[range(len(rows)), SPLIT.labels[rows]])
        np.testing.assert_allclose(records.rows.probability[number, : len(rows)], of_label, rtol=1e-4)


# Loss scaling


def test_overflow_skips_the_step_lowers_the_scale_and_does_not_count_for_the_rate() -> None:
    states, records = run(OVERFLOWING)
    assert records.metrics["skipped"].tolist() == [True, True, True, False, False, False]
    assert records.metrics["skipped"].dtype == bool
    assert np.log2(records.metrics["loss_scale"]).tolist() == [127, 87, 47, 7, 7, 8], (
        "each step's own, not the next one's"
    )
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        for part in ("params", "opt_state", "average"):
            remaining = same_bits(getattr(after, part), getattr(before, part))
            assert remaining == records.metrics["skipped"][number], f"{part} after step {number}"
        assert after.loss_scale is not None
        assert (int(after.step), int(after.loss_scale.skipped_steps)) == (number + 1, min(number + 1, 3))
        assert same_bits(jax.tree.map(jax.random.key_data, after.keys), jax.tree.map(jax.random.key_data, before.keys))
    assert not np.any(np.isfinite(records.metrics["grad_norm"][:3]))
    assert np.all(np.isfinite(records.metrics["grad_norm"][3:]))
    assert np.all(np.isfinite(records.metrics["loss"])), "recorded without its scale"
    np.testing.assert_allclose(
        records.metrics["learning_rate"], 0.1 * (1 - 0.9 * np.array([0, 0, 0, 0, 1, 2]) / 6), rtol=1e-6
    )
    for number in range(3, 6):
        moved = norm_of_difference(states[number + 1].params, states[number].params)
        assert moved == pytest.approx(
            records.metrics["learning_rate"][number] * records.metrics["grad_norm"][number], rel=1e-4
        )


# Optimizers and precisions, on real digits


@pytest.fixture(scope="module")
def on_digits(digits: Split) -> Callable[..., Run]:
    """Train for eight epochs, each combination once."""
    config = train_config(batch_size=32, model=MLP(hidden=(32,), activation="relu", dropout=0.0))
    rates = {"lion": 0.003, "muon": 0.05}
    rng, padding = np.random.default_rng(0), np.full(8, PADDING)
    epochs = [np.append(rng.permutation(600), padding).reshape(19, 32) for _ in range(8)]
    order = np.concatenate(epochs).astype(np.int32)

    @functools.cache
    def train(name: str, precision: Precision) -> Run:
        optimizer = OPTIMIZERS[name]
        rate = rates.get(name, optimizer.learning_rate)
        optimizer = dataclasses.replace(optimizer, learning_rate=rate)
        return run(dataclasses.replace(config, optimizer=optimizer, precision=precision), order, digits, num_classes=10)

    return train


@pytest.mark.parametrize("optimizer", cases(OPTIMIZERS, fast=("adamw", "muon")))
def test_the_loss_falls_on_real_digits_with_every_optimizer(optimizer: str, on_digits: Callable[..., Run]) -> None:
    states, records = on_digits(optimizer, "float32")
    first, last = np.mean(records.metrics["loss"].reshape(8, 19), axis=1)[[0, -1]]
    assert last < first / 2
    assert np.mean(records.metrics["accuracy"][-19:]) > 0.9
    assert floats(states[-1]) == {np.dtype("float32")}


@pytest.mark.parametrize("precision", cases(("bfloat16", "float16"), fast=("float16",)))
def test_low_precision_keeps_the_course_and_the_state_of_float32(
    precision: Precision, on_digits: Callable[..., Run]
) -> None:
    (states, low), (_, full) = on_digits("adamw", precision), on_digits("adamw", "float32")
    assert not same_bits(low.metrics["loss"], full.metrics["loss"])
    np.testing.assert_allclose(low.metrics["loss"], full.metrics["loss"], atol=0.02)
    assert floats(states[-1]) == {np.dtype("float32")}
    assert precision == "bfloat16" or not np.any(low.metrics["skipped"])


def floats(state: TrainState) -> set[np.dtype]:
    """The formats of all that is no count and no key."""
    leaves = jax.tree.leaves(dataclasses.replace(state, keys=None))
    return {leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)}


# Schedules


@pytest.mark.parametrize("kind", ["warmup_cosine", "piecewise"])  # `test_schedules` has the others
def test_the_recorded_rate_is_the_one_of_the_schedule_and_is_applied(kind: str) -> None:
    """Plain gradient descent moves by rate times gradient."""
    config = train_config(**PLAIN, model="linear", schedule=kind)
    (states, records), schedule = run(config), learning_rate(SCHEDULES[kind], 0.1, len(ORDER))
    rates = np.asarray(jax.jit(jax.vmap(schedule))(np.arange(len(ORDER), dtype=np.int32)))
    np.testing.assert_allclose(records.metrics["learning_rate"], rates, rtol=1e-4, atol=1e-9)
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        expected = records.metrics["learning_rate"][number] * records.metrics["grad_norm"][number]
        assert norm_of_difference(after.params, before.params) == pytest.approx(expected, rel=1e-3, abs=1e-7)
