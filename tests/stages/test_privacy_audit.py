"""Planted faults are found by an audit and faultless trainings pass; the bound on epsilon holds with its confidence."""

import dataclasses

import numpy as np
import pytest
from factories import NUM_CLASSES, new_compiler, privacy_audit_config, split_of, train_config
from scipy import stats
from scipy.optimize import linprog

from benchmarks import planted_faults
from gradtrail.core.config import ConfigError
from gradtrail.core.nn.models import Model
from gradtrail.core.privacy_audit import AuditedTraining, draw_canaries
from gradtrail.core.train.optimizers import SGD
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.train.start import NO_START
from gradtrail.stages.privacy_audit import Guesses, audit, gaussian_bound, guess, refutes, require_private

SIGNIFICANCE = 0.05


def test_training_that_is_not_private_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^train\.privacy\.enabled must be true for a privacy audit, got false$"):
        require_private(train_config())
    private, start = dataclasses.replace(NOT_PRIVATE, enabled=True), dataclasses.replace(NO_START, weights="old")
    with pytest.raises(ConfigError, match=r"^train\.start\.weights must be empty for a privacy audit, got old$"):
        require_private(train_config(privacy=private, start=start))


@pytest.mark.parametrize("fault", [None, *planted_faults.FAULTS])
def test_bound_is_above_epsilon_with_a_planted_fault_only(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax regression on noise with a dark margin, at epsilon 3 (`find_noise`)."""
    if fault:
        monkeypatch.setattr(*planted_faults.FAULTS[fault])
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
    model = Model(config.model_config((28, 28), NUM_CLASSES))
    training = AuditedTraining(config, model, len(train), settings.num_canaries, 1.75, compiler=new_compiler())
    result = audit(settings, training, train, canaries, epsilon=3.0, delta=1e-5)
    assert (result.lower_bound > 3) == bool(fault), result.lower_bound
    assert result.guesses == guess(result.scores, result.coins, 0.1)


@pytest.mark.parametrize(("share", "guesses", "correct"), [(0.4, 2, 2), (0.8, 4, 2), (0.0, 0, 0), (1.0, 5, 2)])
def test_guesses_are_the_extreme_scores(share: float, guesses: int, correct: int) -> None:
    scores = np.array([5.0, -5.0, 1.0, -1.0, 0.0])
    outcome = guess(scores, np.array([True, False, False, True, False]), share)
    assert (outcome.canaries, outcome.guesses, outcome.correct) == (5, guesses, correct)


def guesses(canaries: int, guessed: int, correct: int) -> Guesses:
    return Guesses(canaries=canaries, guesses=guessed, correct=correct)


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


@pytest.mark.parametrize("correct", [100, 160, 200])
def test_bound_is_the_epsilon_at_delta_of_the_largest_refuted_mechanism(correct: int) -> None:
    outcome = guesses(2000, 200, correct)
    bound = gaussian_bound(outcome, delta=1e-3, significance=SIGNIFICANCE)
    mus = np.linspace(0, 4, 2001)
    refuted = mus[[refutes(outcome, mu, SIGNIFICANCE) for mu in mus]]
    mu = max(refuted, default=0.0)
    places, width = np.linspace(-12, 16, 200_001, retstep=True)
    excess = stats.norm.pdf(places - mu) - np.exp(bound) * stats.norm.pdf(places)
    assert bound == 0 if correct == 100 else np.maximum(excess, 0).sum() * width == pytest.approx(1e-3, rel=0.02)
