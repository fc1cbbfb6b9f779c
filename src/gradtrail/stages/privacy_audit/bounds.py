"""Lower bounds on epsilon from guesses: which canaries of a training set were in it?

Each of m canaries is put into the training set by an independent fair coin. An auditor sees the outputs of the
training, guesses the coins of r canaries and is right v times. The guarantee under audit bounds the probability of
that, whatever the auditor does and however the guesses depend on each other. The bounds refute the guarantee for data
sets that differ by adding or removing one example, the one of `train.privacy`.

Two theorems are here. That of Steinke, Nasr and Jagielski (arXiv 2305.08846) is on (epsilon, delta); that of
Mahloujifar, Melis and Chaudhuri (arXiv 2410.22235) on the whole trade-off curve of the mechanism, which is known for
one with Gaussian noise and gives larger bounds. Of several trainings with coins of their own the canaries are counted
together, m in all: a coin has a part in one training alone, so all of them as one mechanism have the guarantee of each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy import stats
from scipy.special import log_ndtr, ndtr, ndtri

Tradeoff: TypeAlias = Callable[[float], float]  # false positive rate → least false negative rate; symmetric, convex
LARGEST_EPSILON = 100.0
_HALVINGS = 40


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The outcome of guessing the coins of canaries."""

    canaries: int  # m, number of canaries of all trainings together
    guesses: int  # r, number of guesses; for the other canaries the guesser abstained
    correct: int  # v, number of correct guesses

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.guesses <= self.canaries:
            raise ValueError(f"0 <= correct <= guesses <= canaries must hold, got {self}")


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return the largest chance that an (epsilon, delta)-private mechanism has of so many correct guesses or more.

    arXiv 2305.08846, theorem 5.2: with W of Binomial(r, e^ε / (e^ε + 1)),

        P(correct ≥ v) ≤ P(W ≥ v) + 2 m δ max over i = 1 … v of P(v > W ≥ v - i) / i.

    Each correct guess is at best a randomized response of that epsilon; what delta allows are trainings that fail
    outright, at most m delta of them on average over the canaries.
    """
    truth = 1 / (1 + np.exp(-epsilon))
    chance = stats.binom.sf(guesses.correct - 1, guesses.guesses, truth)
    if delta and guesses.correct:
        before = np.arange(1, guesses.correct + 1)
        below = np.cumsum(stats.binom.pmf(guesses.correct - before, guesses.guesses, truth))
        chance += 2 * guesses.canaries * delta * np.max(below / before)
    return float(min(chance, 1.0))


def epsilon_bound(guesses: Guesses, *, delta: float, significance: float) -> float:
    """Return the largest epsilon that the guesses refute, by `p_value`; 0 if they refute none.

    With confidence 1 - `significance` the mechanism is not (ε, δ)-private for any smaller ε.
    """
    return _largest(lambda epsilon: p_value(guesses, epsilon, delta) < significance)


def refutes(guesses: Guesses, tradeoff: Tradeoff, significance: float) -> bool:
    """Return whether a mechanism with this trade-off curve has a chance of at most `significance` of such guesses.

    arXiv 2410.22235, theorem 3.2 and its algorithm 3, for guesses of one bit: let p_i be the chance of i correct
    guesses, and r_c = Σ over i ≥ c of i p_i / m, h_c = Σ over i ≥ c of (r - i) p_i / m. An f-private mechanism has

        r_c ≤ 1 - f(h_{c-1})  for each c,

    that is h_{c-1} ≥ f(1 - r_c) for a symmetric f. Were the chance of v or more larger than the significance τ, with
    r_v = τ v / m and h_v = τ (r - v) / m at least, each p_{c-1} from c = v down would be at least what brings h_{c-1}
    up to this. Where the p_i then come to more than 1 (r_0 + h_0 > r / m), the chance cannot be larger than τ.
    """
    hits = significance * guesses.correct / guesses.canaries
    misses = significance * (guesses.guesses - guesses.correct) / guesses.canaries
    most = guesses.guesses / guesses.canaries
    for number in range(guesses.correct - 1, -1, -1):
        least = tradeoff(1 - hits)
        if least <= misses:
            return False  # nothing forces fewer correct guesses to have any chance
        hits += number / (guesses.guesses - number) * (least - misses)
        misses = least
        if hits + misses > most:
            return True
    return False


def gaussian_tradeoff(mu: float) -> Tradeoff:
    """Return f(α) = Φ(Φ⁻¹(1 - α) - μ): noise of a standard deviation of 1 / μ sensitivities (arXiv 1905.02383)."""

    def tradeoff(alpha: float) -> float:
        return float(ndtr(-ndtri(alpha) - mu))

    return tradeoff


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return δ = Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2) of the Gaussian mechanism (Balle and Wang, arXiv 1805.06530)."""
    if not mu:
        return 0.0
    return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon at which the Gaussian mechanism is (epsilon, delta)-private."""
    return _largest(lambda epsilon: gaussian_delta(mu, epsilon) > delta)


def gaussian_bound(guesses: Guesses, *, delta: float, significance: float) -> float:
    """Return the epsilon, at delta, of the least private Gaussian mechanism that the guesses refute; 0 for none.

    A training of many noisy steps is close to one Gaussian mechanism (Dong et al., arXiv 1905.02383, section 5), so
    this is the bound for it. It is none for mechanisms in general.
    """
    mu = _largest(lambda mu: refutes(guesses, gaussian_tradeoff(mu), significance), at_most=20.0)
    return gaussian_epsilon(mu, delta)


def _largest(holds: Callable[[float], bool], *, at_most: float = LARGEST_EPSILON) -> float:
    """Return the largest number up to a limit at which a condition still holds, by halving; 0 if it never does."""
    low, high = 0.0, at_most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
