"""Planted faults are found by an audit and faultless trainings pass; bounds on epsilon hold with their confidence."""

import dataclasses
import math
import time

import jax
import numpy as np
import pytest
from factories import NUM_CLASSES, privacy_audit_config, split_of, train_config
from scipy import stats
from scipy.optimize import linprog

from benchmarks import planted_faults
from gradtrail.core.batching import PADDING
from gradtrail.core.config import ConfigError
from gradtrail.core.nn.models import Model
from gradtrail.core.privacy_audit import AuditedTraining, AuditTrace, Guesses, draw_canaries
from gradtrail.core.train.optimizers import SGD
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.privacy_audit import (
    Audit,
    Check,
    audit,
    audit_metrics,
    check_batches,
    check_noise,
    epsilon_bound,
    gaussian_delta,
    p_value,
    refutes,
    require_private,
)

CLAIM = {"epsilon": 3.0, "delta": 1e-5}


def result(**overrides: object) -> Audit:
    outcome = Guesses(canaries=40, guesses=20, correct=15)
    audit_result = Audit(
        **CLAIM,
        confidence=0.95,
        scores=np.linspace(-1, 2, 40),
        coins=np.arange(40) % 3 == 0,
        guesses=outcome,
        lower_bound=1.25,
        lower_bound_any=0.75,
        by_share=[(outcome, 1.25)],
        checks=[Check(name="noise_scale", value=1.0, low=0.99, high=1.01)],
        accuracy=0.5,
    )
    return dataclasses.replace(audit_result, **overrides)


@pytest.mark.parametrize(
    ("overrides", "faults"),
    [
        ({}, []),
        ({"lower_bound": 3.1}, ["epsilon_lower_bound"]),
        ({"lower_bound_any": 3.1}, ["epsilon_lower_bound"]),
        ({"checks": [Check(name="visits", value=2.0, low=0.0, high=1.0)]}, ["visits"]),
        ({"checks": [Check(name="visits", value=math.nan, low=0.0, high=1.0)]}, ["visits"]),
    ],
)
def test_faults_are_named(overrides: dict, faults: list[str]) -> None:
    assert result(**overrides).faults == faults
    assert audit_metrics(result(**overrides))["faults"] == ("".join(faults) or "none")


def test_training_that_is_not_private_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^train\.privacy\.enabled must be true for a privacy audit, got false$"):
        require_private(train_config())


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *planted_faults.FAULTS])
def test_planted_faults_are_found_and_a_faultless_training_passes(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault:
        monkeypatch.setattr(*planted_faults.FAULTS[fault])
    faults = audited().faults
    assert bool(faults) == bool(fault), faults


def audited() -> Audit:
    """An audit of softmax regression on noise with a dark margin, at epsilon 3 (`find_noise`)."""
    rng = np.random.default_rng(0)
    images = np.zeros((1400, 28, 28), np.uint8)
    images[:, 8:20, 8:20] = rng.integers(0, 256, (1400, 12, 12))
    train = split_of(images, rng.integers(0, NUM_CLASSES, 1400, dtype=np.int32))
    config = train_config(
        model="linear",
        batch_size=200,
        epochs=10,
        optimizer=SGD(learning_rate=0.2, momentum=0.0, nesterov=False),
        schedule="constant",
        clip_norm=None,
        privacy=dataclasses.replace(NOT_PRIVATE, enabled=True),
    )
    settings = privacy_audit_config(num_canaries=600, guess_share=0.1)
    canaries = draw_canaries(settings, train, NUM_CLASSES)
    model, noise = Model(config.model_config((28, 28), NUM_CLASSES)), 1.75
    training = AuditedTraining(
        config, model, len(train), settings.num_canaries, noise, compiler=Compiler(time.perf_counter)
    )
    return audit(settings, training, train, canaries, **CLAIM)


STEPS, EPOCHS, EXAMPLES, RATE = 100, 10, 2000, 0.1


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def padded(batches: list[np.ndarray]) -> np.ndarray:
    """Return batches as rows, without the last 100 examples, which are absent."""
    present = [batch[(batch != PADDING) & (batch < EXAMPLES - 100)] for batch in batches]
    length = max(map(len, present))
    rows = [np.pad(batch, (0, length - len(batch)), constant_values=PADDING) for batch in present]
    return np.array(rows, np.int32)


def drawn(seed: int = 1) -> np.ndarray:
    """Return Poisson-sampled batches."""
    return padded([np.flatnonzero(row) for row in rng(seed).uniform(size=(STEPS, EXAMPLES)) < RATE])


def faultless(**overrides: object) -> AuditTrace:
    trace = AuditTrace(
        products=np.zeros((STEPS, 1, 1), np.float32),
        signals=np.zeros((STEPS, 1, 1), np.float32),
        batches=drawn(),
        rate=RATE,
        present=np.arange(EXAMPLES) < EXAMPLES - 100,
        noise=rng().normal(size=(8, 5000)).astype(np.float32),
        accuracy=1.0,
    )
    return dataclasses.replace(trace, **overrides)


def failed(trace: AuditTrace) -> list[str]:
    return [check.name for check in (*check_noise(trace), *check_batches(trace)) if not check.passes]


@pytest.mark.parametrize("seed", range(20))
def test_faultless_training_passes(seed: int) -> None:
    noise = rng(seed).normal(size=(8, 5000)).astype(np.float32)
    assert failed(faultless(noise=noise, batches=drawn(seed))) == []


@pytest.mark.parametrize("scale", [0.9, 1.1, 0.0])
def test_noise_of_another_size_fails(scale: float) -> None:
    assert failed(faultless(noise=faultless().noise * np.float32(scale))) == ["noise_scale"]
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
    batches = padded([*(np.flatnonzero(row < RATE * 2**32) for row in bits), *drawn()[8:]])
    assert failed(faultless(noise=noise, batches=batches)) == ["noise_and_draws"]


def test_order_in_place_of_draws_fails() -> None:
    orders = [rng(epoch).permutation(EXAMPLES).reshape(EPOCHS, -1) for epoch in range(EPOCHS)]
    assert "visits" in failed(faultless(batches=padded([batch for order in orders for batch in order])))


def test_same_draws_in_every_epoch_fail() -> None:
    batches = np.concatenate([drawn()[: STEPS // EPOCHS]] * EPOCHS)
    assert failed(faultless(batches=batches)) == ["visits"]


SIGNIFICANCE = 0.05


def guesses(canaries: int, guessed: int, correct: int) -> Guesses:
    return Guesses(canaries=canaries, guesses=guessed, correct=correct)


@pytest.mark.parametrize(
    ("canaries", "guessed", "correct", "delta", "published"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],  # appendix D and figure 11 of arXiv 2305.08846
)
def test_values_of_the_paper(canaries: int, guessed: int, correct: int, delta: float, published: float) -> None:
    bound = epsilon_bound(guesses(canaries, guessed, correct), delta=delta, significance=SIGNIFICANCE)
    assert bound == pytest.approx(published, abs=1e-3)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("canaries", [1, 5, 20, 60])
def test_epsilon_of_randomized_response_is_rarely_refuted(epsilon: float, canaries: int) -> None:
    truth = 1 / (1 + math.exp(-epsilon))  # the mechanism says each coin, truly with this probability
    bounds = [
        epsilon_bound(guesses(canaries, canaries, correct), delta=0.0, significance=SIGNIFICANCE)
        for correct in range(canaries + 1)
    ]
    chances = stats.binom.pmf(np.arange(canaries + 1), canaries, truth)
    assert chances[np.array(bounds) > epsilon].sum() <= SIGNIFICANCE


@pytest.mark.parametrize("canaries", [1, 2, 4])
@pytest.mark.parametrize("delta", [0.01, 0.05])
def test_p_value_covers_a_mechanism_that_fails_outright_with_delta(canaries: int, delta: float) -> None:
    epsilon = 1.0  # randomized response, but with probability delta for all coins together the truth
    truth = 1 / (1 + math.exp(-epsilon))
    for correct in range(canaries + 1):
        chance = (1 - delta) * stats.binom.sf(correct - 1, canaries, truth) + delta
        assert chance <= p_value(guesses(canaries, canaries, correct), epsilon, delta) + 1e-12


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("canaries", [8, 60, 300])
def test_curve_of_a_gaussian_mechanism_is_rarely_refuted(mu: float, canaries: int) -> None:
    truth = stats.norm.cdf(mu / 2)  # of guessing a coin, ± 1/2, by the sign of it plus noise of 1 / mu
    refuted = [refutes(guesses(canaries, canaries, v), mu, SIGNIFICANCE) for v in range(canaries + 1)]
    chances = stats.binom.pmf(np.arange(canaries + 1), canaries, truth)
    assert chances[refuted].sum() <= SIGNIFICANCE
    assert refuted == sorted(refuted), "more correct guesses refute what fewer do"


def largest_chance(canaries: int, guessed: int, correct: int, mu: float) -> float:
    """The largest chance of so many correct guesses or more under the inequalities of the theorem: a linear program.

    Each 1 - f is concave, so it is the least of its tangents.
    """
    number = np.arange(guessed + 1)
    z = np.linspace(-6, 6, 400)
    place, slope = stats.norm.sf(z), np.exp(mu * z - mu**2 / 2)
    height = 1 - stats.norm.cdf(z - mu)
    rows = [
        (number >= c) * number / canaries - slope[:, None] * (number >= c - 1) * (guessed - number) / canaries
        for c in range(1, guessed + 1)
    ]
    limits = np.tile(height - slope * place, guessed)
    optimum = linprog(-(number >= correct).astype(float), np.concatenate(rows), limits, np.ones((1, guessed + 1)), [1])
    return float(-optimum.fun)


@pytest.mark.parametrize(
    ("canaries", "guessed", "correct", "mu"), [(6, 6, 5, 1.0), (12, 6, 6, 0.5), (40, 10, 9, 0.5), (20, 20, 15, 0.3)]
)
def test_curve_is_refuted_if_chance_is_below_significance(canaries: int, guessed: int, correct: int, mu: float) -> None:
    chance, outcome = largest_chance(canaries, guessed, correct, mu), guesses(canaries, guessed, correct)
    assert not refutes(outcome, mu, 0.99 * chance)
    assert refutes(outcome, mu, 1.01 * chance)


def test_of_a_gaussian_mechanism_the_most_certain_guesses_refute_no_more_often() -> None:
    rng, mu, canaries, guessed, draws = np.random.default_rng(0), 1.0, 200, 20, 2000
    coins = rng.integers(0, 2, (draws, canaries))
    observed = coins - 0.5 + rng.normal(size=(draws, canaries)) / mu
    surest = np.argsort(-np.abs(observed), axis=1)[:, :guessed]
    is_correct = np.take_along_axis((observed > 0) == coins, surest, axis=1).sum(axis=1)
    counts = np.bincount(is_correct, minlength=guessed + 1)
    refuted = [refutes(guesses(canaries, guessed, v), mu, SIGNIFICANCE) for v in range(guessed + 1)]
    assert counts[refuted].sum() <= SIGNIFICANCE * draws


def test_delta_of_a_gaussian_mechanism_is_the_integral_of_the_definition() -> None:
    mu, epsilon = 0.7, 1.3
    places, width = np.linspace(-12, 12, 200_001, retstep=True)
    excess = stats.norm.pdf(places - mu) - math.exp(epsilon) * stats.norm.pdf(places)
    expected = np.maximum(excess, 0).sum() * width
    assert gaussian_delta(mu, epsilon) == pytest.approx(expected, rel=1e-6)
