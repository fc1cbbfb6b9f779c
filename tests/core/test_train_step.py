"""One step: parts make up the whole batch, low precision keeps float32's course, and what is not finite changes nothing.

Steps are compiled one by one here; `test_training` has the loop around them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from factories import NUM_CLASSES, SHAPE, random_split, train_config

from gradtrail.core.augmentation import AugmentationConfig
from gradtrail.core.batches import PADDING
from gradtrail.core.data_parallel import make_mesh
from gradtrail.core.examples import Split
from gradtrail.core.loss_scaling import LossScalingConfig
from gradtrail.core.models import MLPConfig, Model
from gradtrail.core.optimizers import OptimizerKind, SGDConfig
from gradtrail.core.precision import Precision
from gradtrail.core.schedules import ConstantConfig, ScheduleKind
from gradtrail.core.train_config import TrainConfig
from gradtrail.core.train_step import StepRecord, TrainState, make_init, make_step
from gradtrail.core.training import on_device

SPLIT = random_split(10)
ORDER = np.array([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, PADDING, PADDING]] * 2, np.int32)
PLAIN = {"sgd": SGDConfig(learning_rate=0.1, momentum=0.0, nesterov=False), "clip_norm": None}  # moves by rate × gradient
NOISY = train_config(
    mlp=MLPConfig(hidden=(5,), dropout=0.5),
    augmentation=AugmentationConfig(shift=1.0, rotation=10.0, scale=0.1, shear=5.0, cutout=1),
    schedule="constant",
    average_decay=0.3,  # from the fourth step on; before, the stride is longer
)
OVERFLOWING = train_config(
    **PLAIN,
    precision="float16",
    average_decay=0.9,
    loss_scaling=LossScalingConfig(
        initial=2.0**127, growth_factor=2.0, backoff_factor=2.0**-40, growth_interval=2, minimum=1.0
    ),
)


@functools.cache
def compiled(
    config: TrainConfig, num_steps: int, shape: tuple[int, int], num_classes: int
) -> tuple[Callable[..., TrainState], Callable[..., Any]]:
    model = Model(config.model_config(shape, num_classes))
    return make_init(config, model, num_steps), jax.jit(make_step(config, model, num_steps, make_mesh()))


def run(
    config: TrainConfig,
    order: np.ndarray = ORDER,
    split: Split = SPLIT,
    *,
    key: int = 0,
    num_classes: int = NUM_CLASSES,
    change: Callable[[TrainState], TrainState] = lambda state: state,
) -> tuple[list[TrainState], StepRecord]:
    """Make a step for each row of `order`; return the states, the initial one first, and the records."""
    init, step = compiled(config, len(order), split.images.shape[1:], num_classes)
    return run_steps(step, change(init(jax.random.key(key))), order, split)


def run_steps(
    step: Callable[..., Any], state: TrainState, order: np.ndarray, split: Split = SPLIT
) -> tuple[list[TrainState], StepRecord]:
    examples = on_device(split.images, split.labels)
    states, records = [state], []
    for indices in order:
        state, record = step(states[-1], examples, jnp.asarray(indices))
        states.append(state)
        records.append(record)
    return states, jax.tree.map(lambda *leaves: np.stack(leaves), *records)


def norm_of_difference(new: Any, old: Any) -> float:
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, new, old)))


def same_bits(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


# Parts


@pytest.mark.parametrize("accumulation_steps", [2, 4])
def test_a_batch_in_parts_gives_the_gradient_of_the_whole_even_where_a_part_is_padding_alone(
    accumulation_steps: int,
) -> None:
    """Under dropout and augmentation as well: each row draws the same in whichever part it is."""
    whole, in_parts = (run(dataclasses.replace(NOISY, accumulation_steps=count)) for count in (1, accumulation_steps))
    for name in ("loss", "accuracy", "grad_norm", "learning_rate"):
        np.testing.assert_allclose(getattr(in_parts[1], name), getattr(whole[1], name), rtol=1e-5, err_msg=name)
    for found, expected in zip(in_parts[0], whole[0], strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found.params, expected.params)
    assert norm_of_difference(whole[0][-1].params, whole[0][0].params) > 0.1, "else there is nothing to compare"


# The moving average and the parameters to evaluate are


def test_the_average_moves_towards_the_parameters_in_strides_that_shorten() -> None:
    states, _ = run(NOISY)
    average = jax.device_get(states[0].params)
    for number, state in enumerate(states[1:]):
        decay = min(0.3, (1 + number) / (10 + number))
        average = jax.tree.map(lambda old, new, d=decay: d * old + (1 - d) * np.asarray(new), average, state.params)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), state.average, average)
    assert norm_of_difference(states[-1].average, states[-1].params) > 1e-3


# Dropout and augmentation


@pytest.mark.parametrize("noise", ["dropout", "augmentation"])
def test_the_same_batch_draws_anew_in_every_step_and_for_every_row(noise: str) -> None:
    """At a rate so small that no weight moves, the loss of one batch changes by what is drawn alone."""
    still = train_config(schedule="constant", sgd=SGDConfig(learning_rate=1e-30, momentum=0.0, nesterov=False))
    config = dataclasses.replace(still, **{"mlp": NOISY.mlp} if noise == "dropout" else {"augmentation": NOISY.augmentation})
    batch = np.array([0, 0, 0, 0], np.int32)
    states, records = run(config, np.tile(batch, (3, 1)))
    np.testing.assert_allclose(
        *(state.params["layers"][0]["kernel"] for state in (states[0], states[-1])), rtol=0, atol=1e-20
    )
    assert len(set(records.loss.tolist())) == 3
    alone = [
        run(config, np.tile(np.where(np.arange(4) == row, batch, PADDING), (3, 1)))[1].loss[0] for row in range(4)
    ]
    assert len(set(alone)) > 1, "one row draws what another does"
    np.testing.assert_allclose(np.mean(alone), records.loss[0], rtol=1e-5)


def test_the_same_key_draws_the_same_and_another_does_not() -> None:
    def with_key(seed: int) -> tuple[list[TrainState], StepRecord]:
        return run(NOISY, change=lambda state: dataclasses.replace(state, key=jax.random.key(seed)))

    (states, records), (again, same_records), (others, _) = with_key(0), with_key(0), with_key(1)
    assert same_bits(records, same_records)
    assert same_bits(states[-1].params, again[-1].params)
    assert same_bits(states[0].params, others[0].params)
    assert not same_bits(states[1].params, others[1].params)


# Loss scaling


def test_a_step_that_overflows_changes_nothing_but_is_counted_and_lowers_the_scale() -> None:
    states, records = run(OVERFLOWING)
    assert records.skipped.tolist() == [True, True, True, False, False, False]
    assert records.skipped.dtype == bool
    assert [float(np.log2(scale)) for scale in records.loss_scale] == [127, 87, 47, 7, 7, 8], "what a step is done with"
    for number in range(6):
        before, after = states[number], states[number + 1]
        assert int(after.step) == number + 1
        kept = [same_bits(getattr(after, name), getattr(before, name)) for name in ("opt_state", "average")]
        assert kept == [bool(records.skipped[number])] * 2
        assert after.loss_scale is not None
        assert int(after.loss_scale.skipped_steps) == min(number + 1, 3)
        assert jax.random.key_data(after.key).tolist() == jax.random.key_data(before.key).tolist()
    for state in states[:5]:  # the fourth step is the first that counts, and the warm-up begins at 0
        assert same_bits(state.params, states[0].params)
    assert not np.any(np.isfinite(records.grad_norm[:3]))
    assert np.all(np.isfinite(records.loss)), "the loss is recorded without its scale"


def test_the_rate_goes_by_the_steps_that_count() -> None:
    states, records = run(OVERFLOWING)
    np.testing.assert_allclose(records.learning_rate, [0, 0, 0, 0, 0.05, 0.1], rtol=1e-6)
    for number in range(3, 6):
        moved = norm_of_difference(states[number + 1].params, states[number].params)
        assert moved == pytest.approx(records.learning_rate[number] * records.grad_norm[number], rel=1e-4)


def test_after_its_overflows_a_training_goes_on_as_if_they_had_not_been() -> None:
    calm = dataclasses.replace(OVERFLOWING.loss_scaling, initial=2.0**7)
    states, _ = run(OVERFLOWING)
    _, step = compiled(OVERFLOWING, len(ORDER), SHAPE, NUM_CLASSES)
    fresh = dataclasses.replace(
        states[0], loss_scale=dataclasses.replace(states[0].loss_scale, scale=jnp.float32(calm.initial))
    )
    others, records = run_steps(step, fresh, ORDER[3:])
    assert not np.any(records.skipped)
    for name in ("params", "opt_state"):
        assert same_bits(getattr(others[-1], name), getattr(states[-1], name))


# Precisions and optimizers, on real digits

DIGITS = train_config(
    optimizer="adamw",
    batch_size=32,
    mlp=MLPConfig(hidden=(32,), dropout=0.0),
    schedule_free=dataclasses.replace(train_config().schedule_free, warmup_fraction=0.0),
)


@functools.cache
def digits_order(epochs: int = 8) -> np.ndarray:
    rng = np.random.default_rng(0)
    padding = np.full(8, PADDING)
    return np.concatenate([np.append(rng.permutation(600), padding).reshape(19, 32) for _ in range(epochs)]).astype(
        np.int32
    )


RUNS: dict[TrainConfig, tuple[list[TrainState], StepRecord]] = {}


def on_digits(digits: Split, **overrides: Any) -> tuple[list[TrainState], StepRecord]:
    config = dataclasses.replace(DIGITS, **overrides)
    if config not in RUNS:
        RUNS[config] = run(config, digits_order(), digits, num_classes=10)
    return RUNS[config]


@pytest.mark.parametrize("optimizer", get_args(OptimizerKind))
def test_the_loss_falls_on_real_digits_with_every_optimizer(optimizer: OptimizerKind, digits: Split) -> None:
    _, records = on_digits(digits, optimizer=optimizer)
    first, last = (np.mean(records.loss.reshape(8, 19)[epoch]) for epoch in (0, -1))
    print(optimizer, first, last, np.mean(records.accuracy[-19:]))
    assert last < first / 2
    assert np.mean(records.accuracy[-19:]) > 0.95


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_keeps_the_course_of_float32(precision: Precision, digits: Split) -> None:
    low, full = (on_digits(digits, precision=name)[1] for name in (precision, "float32"))
    assert not same_bits(low.loss, full.loss)
    print(precision, np.abs(low.loss- full.loss).max(), np.abs(low.loss- full.loss).mean())
    np.testing.assert_allclose(low.loss, full.loss, atol=0.05)
    if precision == "float16":
        assert not np.any(low.skipped)


@pytest.mark.parametrize("precision", get_args(Precision))
def test_parameters_and_optimizer_state_are_float32_in_every_precision(precision: Precision, digits: Split) -> None:
    state = on_digits(digits, precision=precision)[0][-1]
    kinds = {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state))}
    assert kinds == {np.dtype("float32"), np.dtype("int32")}, "int32 is the optimizer's count of steps"
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}


# Schedules


@pytest.mark.parametrize("kind", get_args(ScheduleKind))
def test_one_override_switches_the_schedule_that_steps_are_made_with(kind: ScheduleKind) -> None:
    """Uncompiled: a short softmax regression by plain gradient descent moves by rate times gradient."""
    config = train_config(**PLAIN, model="linear", schedule=kind)
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    step = make_step(config, model, len(ORDER), make_mesh())
    states, records = run_steps(step, make_init(config, model, len(ORDER))(jax.random.key(0)), ORDER)
    np.testing.assert_allclose(records.learning_rate, 0.1 * RATES[kind], rtol=1e-4, atol=1e-9)
    for number, (rate, norm) in enumerate(zip(records.learning_rate, records.grad_norm, strict=True)):
        moved = norm_of_difference(states[number + 1].params, states[number].params)
        assert moved == pytest.approx(rate * norm, rel=1e-3, abs=1e-7)


STEPS = np.arange(6)
RATES: dict[ScheduleKind, np.ndarray] = {
    "constant": np.ones(6),
    "cosine": (1 + np.cos(np.pi * STEPS / 6)) / 2,
    "warmup_cosine": np.append([0, 0.5], 0.1 + 0.9 * (1 + np.cos(np.pi * np.arange(4) / 4)) / 2),
    "linear": 1 - 0.9 * STEPS / 6,
    "exponential": 0.01 ** (STEPS / 6),
    "piecewise": np.array([1, 1, 1, 0.1, 0.01, 0.01]),
    "one_cycle": np.zeros(6),
}
