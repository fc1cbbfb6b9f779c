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

from gradtrail.core.train.loss_scaling import LossScale, LossScalingConfig, all_finite, initial_scale, next_scale

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
        state = next_scale(config, state, finite)
        return state, state

    return jax.jit(lambda finite: jax.lax.scan(step, initial_scale(config), finite)[1])


def scan(config: LossScalingConfig, finite: list[bool]) -> LossScale:
    """Return the scale after each of the steps."""
    result = compiled(config)(np.resize(np.array(finite), LENGTH))
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(finite)], result)


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
    result, (scales, streaks, skips) = scan(config, finite), modelled(config, finite)
    np.testing.assert_array_equal(result.scale, np.array(scales, np.float32))
    np.testing.assert_array_equal(result.finite_steps, streaks)
    np.testing.assert_array_equal(result.skipped_steps, skips)


@pytest.mark.parametrize(
    ("value", "finite"), [(0.0, True), (3e38, True), (math.inf, False), (-math.inf, False), (math.nan, False)]
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_one_number_anywhere_makes_a_tree_not_finite(value: float, finite: bool, place: str) -> None:
    tree = {"first": jnp.zeros((2, 3)), "last": jnp.zeros(4)}
    tree[place] = tree[place].at[-1].set(value)
    assert bool(all_finite(tree)) is finite
