"""Bounds on epsilon hold with the stated confidence, against mechanisms whose outcomes can be enumerated."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import linprog

from gradtrail.stages.privacy_audit.bounds import (
    Guesses,
    epsilon_bound,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_tradeoff,
    p_value,
    refutes,
)

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
def test_of_randomized_response_the_bound_is_too_large_in_one_of_twenty_draws_at_most(
    epsilon: float, canaries: int
) -> None:
    truth = 1 / (1 + math.exp(-epsilon))  # the mechanism says each coin, truly with this probability
    bounds = [
        epsilon_bound(guesses(canaries, canaries, correct), delta=0.0, significance=SIGNIFICANCE)
        for correct in range(canaries + 1)
    ]
    chances = stats.binom.pmf(np.arange(canaries + 1), canaries, truth)
    assert chances[np.array(bounds) > epsilon].sum() <= SIGNIFICANCE


def test_bound_comes_close_with_many_guesses() -> None:
    truth = 1 / (1 + math.exp(-1.0))
    outcome = guesses(10**6, 10**6, round(truth * 10**6))
    assert 0.99 < epsilon_bound(outcome, delta=0.0, significance=SIGNIFICANCE) < 1.0


@pytest.mark.parametrize("canaries", [1, 2, 4])
@pytest.mark.parametrize("delta", [0.01, 0.05])
def test_p_value_covers_a_mechanism_that_fails_outright_with_delta(canaries: int, delta: float) -> None:
    epsilon = 1.0  # randomized response, but with probability delta for all coins together the truth
    truth = 1 / (1 + math.exp(-epsilon))
    for correct in range(canaries + 1):
        chance = (1 - delta) * stats.binom.sf(correct - 1, canaries, truth) + delta
        assert chance <= p_value(guesses(canaries, canaries, correct), epsilon, delta) + 1e-12


def test_larger_delta_allows_more_correct_guesses() -> None:
    outcome = guesses(1000, 100, 90)
    bounds = [epsilon_bound(outcome, delta=delta, significance=SIGNIFICANCE) for delta in (0.0, 1e-5, 1e-4, 1e-3)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < bounds[0]


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(("canaries", "guessed"), [(8, 8), (60, 60), (300, 300)])
def test_of_a_gaussian_mechanism_its_curve_is_refuted_in_one_of_twenty_draws_at_most(
    mu: float, canaries: int, guessed: int
) -> None:
    truth = stats.norm.cdf(mu / 2)  # of guessing a coin, ± 1/2, by the sign of it plus noise of 1 / mu
    refuted = [refutes(guesses(canaries, guessed, v), gaussian_tradeoff(mu), SIGNIFICANCE) for v in range(guessed + 1)]
    chances = stats.binom.pmf(np.arange(guessed + 1), guessed, truth)
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
    assert not refutes(outcome, gaussian_tradeoff(mu), 0.99 * chance)
    assert refutes(outcome, gaussian_tradeoff(mu), 1.01 * chance)


def test_of_a_gaussian_mechanism_the_most_certain_guesses_refute_no_more_often() -> None:
    rng, mu, canaries, guessed, draws = np.random.default_rng(0), 1.0, 200, 20, 2000
    coins = rng.integers(0, 2, (draws, canaries))
    observed = coins - 0.5 + rng.normal(size=(draws, canaries)) / mu
    surest = np.argsort(-np.abs(observed), axis=1)[:, :guessed]
    is_correct = np.take_along_axis((observed > 0) == coins, surest, axis=1).sum(axis=1)
    counts = np.bincount(is_correct, minlength=guessed + 1)
    refuted = [refutes(guesses(canaries, guessed, v), gaussian_tradeoff(mu), SIGNIFICANCE) for v in range(guessed + 1)]
    assert counts[refuted].sum() <= SIGNIFICANCE * draws


def test_delta_of_a_gaussian_mechanism_is_the_integral_of_the_definition() -> None:
    mu, epsilon = 0.7, 1.3
    places, width = np.linspace(-12, 12, 200_001, retstep=True)
    excess = stats.norm.pdf(places - mu) - math.exp(epsilon) * stats.norm.pdf(places)
    expected = np.maximum(excess, 0).sum() * width
    assert gaussian_delta(mu, epsilon) == pytest.approx(expected, rel=1e-6)
    assert gaussian_epsilon(mu, gaussian_delta(mu, epsilon)) == pytest.approx(epsilon, rel=1e-6)
