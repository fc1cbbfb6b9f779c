"""Schedules at their key points, and what each transformation does to a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from factories import optimizer_config

from gradtrail.core.optimizers import AdamWConfig, SGDConfig, WarmupCosineConfig, make_optimizer, make_schedule

PARAMS = {"kernel": jnp.full((3, 2), 2.0), "bias": jnp.full(2, 2.0)}
GRADS = jax.tree.map(lambda leaf: 3.0 * jnp.ones_like(leaf), PARAMS)


def learning_rate(step: int, num_steps: int = 100, **overrides: object) -> float:
    return float(make_schedule(optimizer_config(**overrides), num_steps)(jnp.int32(step)))


def updates(grads: dict = GRADS, steps: int = 1, **overrides: object) -> dict:
    """Return the last of several updates under a constant rate of 0.1, from the same gradient and parameters."""
    config = optimizer_config(**{"schedule": "constant", "clip_norm": None, **overrides})
    optimizer = make_optimizer(config, make_schedule(config, 10))
    state = optimizer.init(PARAMS)
    for _ in range(steps):
        result, state = jax.jit(optimizer.update)(grads, state, PARAMS)
    return result


def test_the_constant_schedule_is_constant() -> None:
    assert [learning_rate(step, schedule="constant") for step in (0, 50, 99)] == pytest.approx([0.1] * 3)


def test_warmup_rises_in_a_line_and_a_half_cosine_falls() -> None:
    shape = {"warmup_cosine": WarmupCosineConfig(warmup_fraction=0.2, end_fraction=0.1)}
    rates = [learning_rate(step, **shape) for step in range(101)]
    np.testing.assert_allclose(rates[:21], np.linspace(0, 0.1, 21), atol=1e-8)
    falling = 0.01 + 0.09 * (1 + np.cos(np.pi * np.arange(81) / 80)) / 2
    np.testing.assert_allclose(rates[20:], falling, atol=1e-7)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_shortest_trainings_have_a_schedule(num_steps: int, fraction: float) -> None:
    shape = {"warmup_cosine": WarmupCosineConfig(warmup_fraction=fraction, end_fraction=0.0)}
    rates = [learning_rate(step, num_steps, **shape) for step in range(num_steps)]
    assert all(0 <= rate <= 0.1001 for rate in rates)
    if fraction == 0:
        assert rates[0] == pytest.approx(0.1)


def test_plain_sgd_is_the_gradient_times_the_rate() -> None:
    plain = updates(kind="sgd", sgd=SGDConfig(momentum=0.0, nesterov=False), steps=3)
    np.testing.assert_allclose(plain["kernel"], np.full((3, 2), -0.3), rtol=1e-6)


@pytest.mark.parametrize(("nesterov", "expected"), [(False, 1 + 0.9), (True, 1 + 0.9 * 1.9)])
def test_momentum_adds_up(nesterov: bool, expected: float) -> None:
    second = updates(kind="sgd", sgd=SGDConfig(momentum=0.9, nesterov=nesterov), steps=2)
    np.testing.assert_allclose(second["bias"], np.full(2, -0.3 * expected), rtol=1e-6)


def test_nesterov_without_momentum_is_plain() -> None:
    plain = updates(kind="sgd", sgd=SGDConfig(momentum=0.0, nesterov=True))
    np.testing.assert_allclose(plain["bias"], np.full(2, -0.3), rtol=1e-6)


def test_weight_decay_pulls_on_weights_and_leaves_biases_alone() -> None:
    decayed, plain = (
        updates(kind="adamw", adamw=AdamWConfig(b1=0.9, b2=0.999, eps=1e-8, weight_decay=decay)) for decay in (0.5, 0.0)
    )
    np.testing.assert_allclose(decayed["kernel"] - plain["kernel"], np.full((3, 2), -0.1 * 0.5 * 2.0), rtol=1e-5)
    np.testing.assert_array_equal(decayed["bias"], plain["bias"])


def test_the_first_update_of_adam_is_the_rate_against_the_sign() -> None:
    first = updates(kind="adamw", adamw=AdamWConfig(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0))
    np.testing.assert_allclose(first["kernel"], np.full((3, 2), -0.1), rtol=1e-5)


@pytest.mark.parametrize(("clip_norm", "norm"), [(0.5, 0.5), (1e9, None), (None, None)])
def test_clipping_bounds_the_norm_and_keeps_the_direction(clip_norm: float | None, norm: float | None) -> None:
    unclipped = optax.tree.norm(GRADS)
    clipped = updates(kind="sgd", sgd=SGDConfig(momentum=0.0, nesterov=False), clip_norm=clip_norm)
    np.testing.assert_allclose(optax.tree.norm(clipped), 0.1 * (norm or unclipped), rtol=1e-5)
    np.testing.assert_allclose(clipped["kernel"].ravel()[0], clipped["bias"][0], rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (lambda: SGDConfig(momentum=1.0, nesterov=False), "momentum"),
        (lambda: AdamWConfig(b1=-0.1, b2=0.9, eps=1e-8, weight_decay=0.0), "b1"),
        (lambda: AdamWConfig(b1=0.9, b2=1.0, eps=1e-8, weight_decay=0.0), "b2"),
        (lambda: AdamWConfig(b1=0.9, b2=0.9, eps=0.0, weight_decay=0.0), "eps"),
        (lambda: AdamWConfig(b1=0.9, b2=0.9, eps=1e-8, weight_decay=-1.0), "weight_decay"),
        (lambda: WarmupCosineConfig(warmup_fraction=1.0, end_fraction=0.0), "warmup_fraction"),
        (lambda: WarmupCosineConfig(warmup_fraction=0.0, end_fraction=1.1), "end_fraction"),
    ],
)
def test_values_out_of_range_are_refused_by_name(config, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be "):
        config()
