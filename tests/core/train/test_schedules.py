"""Schedules equal their formulas at every step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrail.core.train.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    OneCycle,
    Piecewise,
    Schedule,
    WarmupCosine,
    WarmupInverseSqrt,
    learning_rate,
)

PEAK = 0.1
STEPS = np.arange(100)
INSIDE = st.floats(0.001, 0.999)
UP_TO_1 = st.floats(0, 1)


def rates(config: Schedule, num_steps: int) -> np.ndarray:
    schedule = learning_rate(config, PEAK, num_steps)
    steps = jnp.arange(100, dtype=jnp.int32)  # of one length, so that nothing is compiled anew
    return np.asarray(jax.vmap(lambda step: jnp.asarray(schedule(step), jnp.float32))(steps))[:num_steps]


def half_cosine(first: float, last: float, num_steps: int) -> np.ndarray:
    return last + (first - last) * (1 + np.cos(np.pi * np.arange(num_steps) / num_steps)) / 2


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        (Constant(warmup_fraction=0.0), np.ones(100)),
        (Constant(warmup_fraction=0.2), np.minimum(STEPS / 20, 1)),
        (Cosine(end_fraction=0.2), half_cosine(1, 0.2, 100)),
        (
            WarmupCosine(warmup_fraction=0.2, end_fraction=0.1),
            np.concatenate([STEPS[:20] / 20, half_cosine(1, 0.1, 80)]),
        ),
        (
            WarmupInverseSqrt(warmup_fraction=0.2),
            np.minimum(STEPS / 20, np.sqrt(20 / np.maximum(STEPS, 1))),
        ),
        (Linear(end_fraction=0.2), 1 - 0.8 * STEPS / 100),
        (Exponential(end_fraction=0.01), 0.01 ** (STEPS / 100)),
        (Piecewise(boundaries=(0.5, 0.75), factor=0.1), np.repeat([1, 0.1, 0.01], [50, 25, 25])),
        (Piecewise(boundaries=(), factor=0.1), np.ones(100)),
        (
            OneCycle(warmup_fraction=0.3, div_factor=25.0, final_div_factor=100.0),
            np.concatenate([half_cosine(1 / 25, 1, 30), half_cosine(1, 1 / 2500, 70)]),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rates_equal_the_formula(config: Schedule, shares: np.ndarray) -> None:
    np.testing.assert_allclose(rates(config, 100), PEAK * shares, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (Constant, {"warmup_fraction": INSIDE | st.just(0.0)}),
        (Cosine, {"end_fraction": UP_TO_1}),
        (WarmupCosine, {"warmup_fraction": INSIDE | st.just(0.0), "end_fraction": UP_TO_1}),
        (WarmupInverseSqrt, {"warmup_fraction": INSIDE | st.just(0.0)}),
        (Linear, {"end_fraction": UP_TO_1}),
        (Exponential, {"end_fraction": st.floats(1e-6, 1)}),
        (Piecewise, {"boundaries": st.sets(INSIDE, max_size=4).map(sorted).map(tuple), "factor": INSIDE}),
        (
            OneCycle,
            {"warmup_fraction": INSIDE, "div_factor": st.floats(1, 100), "final_div_factor": st.floats(1, 1e5)},
        ),
    ],
)
@settings(max_examples=10)
@given(data=st.data(), num_steps=st.integers(1, 4) | st.integers(1, 100))
def test_a_training_of_any_length_rises_to_the_highest_rate_and_falls_to_no_less_than_0(
    make: Callable[..., Schedule], values: dict, data: st.DataObject, num_steps: int
) -> None:
    result = rates(make(**data.draw(st.fixed_dictionaries(values))), num_steps)
    highest = int(np.argmax(result))
    assert result.shape == (num_steps,)
    assert np.all(result >= 0)
    assert result[highest] == pytest.approx(PEAK, rel=1e-5)
    assert np.all(np.diff(result[: highest + 1]) >= -1e-8)
    assert np.all(np.diff(result[highest:]) <= 1e-8)


def test_drops_in_the_same_step_of_a_short_training_all_count() -> None:
    config = Piecewise(boundaries=(0.5, 0.75), factor=0.1)
    np.testing.assert_allclose(rates(config, 2), [PEAK, PEAK * 0.01], rtol=1e-5)
    np.testing.assert_allclose(rates(config, 1), [PEAK], rtol=1e-5)
