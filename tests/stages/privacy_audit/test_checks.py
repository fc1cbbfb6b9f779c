"""A faultless training passes all checks, and each check detects its fault."""

import dataclasses

import jax
import numpy as np
import pytest

from gradtrail.core.common.batching import PADDING
from gradtrail.core.privacy_audit.scores import Products
from gradtrail.core.privacy_audit.training import AuditTrace
from gradtrail.stages.privacy_audit.checks import Check, check_training

STEPS, EPOCHS, EXAMPLES, RATE = 100, 10, 2000, 0.1
NONE = Products(products=np.zeros((STEPS, 1, 1), np.float32), signals=np.zeros((STEPS, 1, 1), np.float32))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def padded(batches: list[np.ndarray]) -> np.ndarray:
    room = max(map(len, batches))
    rows = [np.pad(batch, (0, room - len(batch)), constant_values=PADDING) for batch in batches]
    return np.array(rows, np.int32)


def drawn(seed: int = 1) -> np.ndarray:
    """Poisson-sampled batches, none of them with one of the last 100 examples, which are absent."""
    return padded([np.flatnonzero(row[:-100]) for row in rng(seed).uniform(size=(STEPS, EXAMPLES)) < RATE])


def faultless(**overrides: object) -> AuditTrace:
    trace = AuditTrace(
        products=NONE,
        batches=drawn(),
        rate=RATE,
        present=np.arange(EXAMPLES) < EXAMPLES - 100,
        noise=rng().normal(size=(8, 5000)).astype(np.float32),
        accuracy=1.0,
    )
    return dataclasses.replace(trace, **overrides)


def failed(trace: AuditTrace) -> list[str]:
    return [check.name for check in check_training(trace) if not check.passes]


@pytest.mark.parametrize("seed", range(20))
def test_faultless_training_passes(seed: int) -> None:
    noise = rng(seed).normal(size=(8, 5000)).astype(np.float32)
    assert failed(faultless(noise=noise, batches=drawn(seed))) == []


@pytest.mark.parametrize("scale", [0.9, 1.1, 0.0])
def test_noise_of_another_size_fails(scale: float) -> None:
    assert failed(faultless(noise=faultless().noise * np.float32(scale))) == ["noise_scale"]


def test_training_without_noise_fails() -> None:
    assert failed(faultless(noise=np.zeros((0, 0), np.float32))) == ["noise_scale"]


@pytest.mark.parametrize("sign", [1, -1])
def test_noise_that_comes_again_fails(sign: int) -> None:
    noise = faultless().noise.copy()
    noise[5] = sign * noise[2]
    assert failed(faultless(noise=noise)) == ["noise_between_steps"]


def test_key_for_noise_and_draws_fails() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    noise = np.array([jax.random.normal(key, (5000,)) for key in keys])
    bits = np.array([jax.random.bits(key, (EXAMPLES,), np.uint32) for key in keys])
    batches = [np.flatnonzero(row < RATE * 2**32) for row in bits]
    batches = [batch[batch < EXAMPLES - 100] for batch in batches]
    rest = [row[row != PADDING] for row in drawn()[8:]]
    assert failed(faultless(noise=noise, batches=padded([*batches, *rest]))) == ["noise_and_draws"]


def test_order_in_place_of_draws_fails() -> None:
    orders = [rng(epoch).permutation(EXAMPLES).reshape(EPOCHS, -1) for epoch in range(EPOCHS)]
    batches = [batch[batch < EXAMPLES - 100] for order in orders for batch in order]
    assert "visits" in failed(faultless(batches=padded(batches)))


def test_same_draws_in_every_epoch_fail() -> None:
    batches = [row[row != PADDING] for row in drawn()[: STEPS // EPOCHS]] * EPOCHS
    assert failed(faultless(batches=padded(batches))) == ["visits"]


def test_value_that_is_no_number_does_not_pass() -> None:
    assert not Check(name="x", value=float("nan"), low=0.0, high=1.0).passes
