"""The scale of the loss moves as in jmp and in Flax: against a model of it in plain Python."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.train.loss_scaling import LossScale, LossScalingConfig, adjusted, all_finite, initial_scale

LENGTH = 40
HIGHEST = 2.0**127  # of the powers of 2 that float32 can hold


def scaling(**overrides: Any) -> LossScalingConfig:
    values = {"initial": 2.0**15, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "minimum": 1.0}
    return LossScalingConfig(**values | overrides)


CONFIGS = [
    scaling(),
    scaling(growth_interval=1),
    scaling(initial=2.0, minimum=2.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2),
    scaling(initial=HIGHEST, growth_interval=2),
]


@functools.cache
def compiled(config: LossScalingConfig) -> Callable[[jax.Array], LossScale]:
    def step(state: LossScale, finite: jax.Array) -> tuple[LossScale, LossScale]:
        state = adjusted(config, state, finite)
        return state, state

    return jax.jit(lambda finite: jax.lax.scan(step, initial_scale(config), finite)[1])


def scan(config: LossScalingConfig, finite: list[bool]) -> LossScale:
    """Return the scale after each of the steps."""
    found = compiled(config)(np.resize(np.array(finite), LENGTH))
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(finite)], found)


def modelled(config: LossScalingConfig, finite: list[bool]) -> tuple[list[float], list[int], list[int]]:
    scale, streak, skipped = config.initial, 0, 0
    scales, streaks, skips = [], [], []
    for is_finite in finite:
        if not is_finite:
            scale, streak, skipped = max(scale * config.backoff_factor, config.minimum), 0, skipped + 1
        else:
            streak += 1
            if streak == config.growth_interval:
                streak = 0
                scale = scale * config.growth_factor if scale * config.growth_factor <= HIGHEST else scale
        scales, streaks, skips = [*scales, scale], [*streaks, streak], [*skips, skipped]
    return scales, streaks, skips


@pytest.mark.parametrize("config", CONFIGS)
@given(finite=st.lists(st.booleans() | st.just(True), min_size=LENGTH, max_size=LENGTH))
def test_any_run_of_steps_equals_plain_python(config: LossScalingConfig, finite: list[bool]) -> None:
    found, (scales, streaks, skips) = scan(config, finite), modelled(config, finite)
    np.testing.assert_array_equal(found.scale, np.array(scales, np.float32))
    np.testing.assert_array_equal(found.finite_steps, streaks)
    np.testing.assert_array_equal(found.skipped_steps, skips)


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_the_scale_grows_on_exactly_the_last_finite_step_of_an_interval(interval: int) -> None:
    found = scan(scaling(growth_interval=interval), [True] * 2 * interval)
    expected = [2.0**15] * (interval - 1) + [2.0**16] * interval + [2.0**17]
    np.testing.assert_array_equal(found.scale, expected)
    assert int(found.finite_steps[-1]) == 0


def test_an_overflow_lowers_the_scale_and_begins_to_count_anew() -> None:
    found = scan(scaling(), [True, True, False, True, True, True])
    np.testing.assert_array_equal(found.scale, [2.0**15] * 2 + [2.0**14] * 3 + [2.0**15])
    np.testing.assert_array_equal(found.finite_steps, [1, 2, 0, 1, 2, 0])
    np.testing.assert_array_equal(found.skipped_steps, [0, 0, 1, 1, 1, 1])


def test_the_scale_falls_to_its_minimum_and_no_further() -> None:
    found = scan(scaling(initial=8.0, minimum=3.0), [False] * 4)
    np.testing.assert_array_equal(found.scale, [4, 3, 3, 3])


def test_a_scale_that_cannot_grow_stays() -> None:
    found = scan(scaling(initial=HIGHEST, growth_interval=2), [True] * 5)
    np.testing.assert_array_equal(found.scale, np.full(5, HIGHEST, np.float32))
    np.testing.assert_array_equal(found.finite_steps, [1, 0, 1, 0, 1])


def test_the_state_keeps_its_dtypes() -> None:
    config = scaling()
    before = initial_scale(config)
    after = adjusted(config, before, jnp.array(True))
    for state in (before, after):
        assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [jnp.float32, jnp.int32, jnp.int32]
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("value", "finite"), [(0.0, True), (3e38, True), (math.inf, False), (-math.inf, False), (math.nan, False)]
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_one_number_anywhere_makes_a_tree_not_finite(value: float, finite: bool, place: str) -> None:
    tree = {"first": jnp.zeros((2, 3)), "last": jnp.zeros(4)}
    tree[place] = tree[place].at[-1].set(value)
    assert bool(all_finite(tree)) is finite


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("minimum", 0.0),
        ("initial", 0.5),
        ("growth_factor", 1.0),
        ("backoff_factor", 1.0),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
    ],
)
def test_values_out_of_range_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be "):
        scaling(**{key: value})
