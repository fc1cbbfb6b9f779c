"""Lower bounds on epsilon from guesses: which canaries of a training set were in it?

Each of m canaries is put into the training set by an independent fair coin. An auditor sees the outputs of the
training, guesses the coins of r canaries and is right v times. The guarantee under audit bounds the probability of
that, whatever the auditor does and however the guesses depend on each other. The bounds refute the guarantee for data
sets that differ by adding or removing one example, the one of `train.privacy`.

Two theorems are here. That of Steinke, Nasr and Jagielski (arXiv 2305.08846) is on (epsilon, delta); that of
Mahloujifar, Melis and Chaudhuri (arXiv 2410.22235) on the whole trade-off curve of the mechanism, which is known for
one with Gaussian noise and gives larger bounds. Of several trainings with coins of their own the canaries are counted
together, m in all: a coin has a part in one training alone, so all of them as one mechanism have the guarantee of each.

Guesses see what an attacker sees. Direct checks of noise and batches detect faults that leak little, or in a way that
the guesses do not use; a faultless training fails any of them with a probability below one in a million.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import log_ndtr, ndtr, ndtri

from gradtrail.core.batching import PADDING
from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split
from gradtrail.core.intervals import bisect
from gradtrail.core.privacy_audit import (
    AuditedTraining,
    AuditTrace,
    Canaries,
    Coins,
    Guesses,
    PrivacyAuditConfig,
    Scores,
    batch_scores,
    fixed_order_scores,
    guess,
    log_ratios,
)
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.keys import keys_of
from gradtrail.stages.common import plotting

_HALVINGS = 40
_SIGMAS = 6.0  # limits of a check, in standard errors
_CHI2_CHANCE = 1e-8  # of a false alarm of the check of batch sizes, at either limit
_FIXED_ORDER_CHANCE = 1e-6  # of a false alarm of the check for a fixed order
_ROUNDING = 1e-3  # rounding error of noise that is the difference of two float32 numbers
_PURPOSES = ("initialization", "order", "augmentation", "dropout", "noise")
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01)  # shares of the canaries in the figure
_HISTOGRAM_BINS = 40


@dataclass(frozen=True, kw_only=True)
class Check:
    """A measured number with its limits."""

    name: str
    value: float
    low: float  # least value that passes
    high: float  # largest value that passes

    @property
    def excess(self) -> float:
        """How far the value is beyond the nearest limit, negative within the limits."""
        return max(self.low - self.value, self.value - self.high)

    @property
    def passes(self) -> bool:
        return self.low <= self.value <= self.high  # false for NaN


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit of trainings that claim to be (epsilon, delta)-private each."""

    epsilon: float
    delta: float
    confidence: float  # confidence of the lower bounds
    scores: Scores  # score of every canary of every training
    coins: Coins  # True if the canary was in the training set
    guesses: Guesses  # guesses for the configured share of the canaries, by `scores`
    lower_bound: float  # lower bound on epsilon, by the trade-off curve of Gaussian noise (arXiv 2410.22235)
    lower_bound_any: float  # lower bound on epsilon for any mechanism (arXiv 2305.08846)
    by_share: list[tuple[Guesses, float]]  # guesses and `lower_bound` for other shares, each evaluated alone
    checks: list[Check]  # checks of the trainings, the worst result of each
    accuracy: float  # accuracy on the batches of the last epoch, mean over the trainings

    @property
    def faults(self) -> list[str]:
        """The names of the results that contradict the guarantee; empty if there are none."""
        names = ["epsilon_lower_bound"] if max(self.lower_bound, self.lower_bound_any) > self.epsilon else []
        return names + [check.name for check in self.checks if not check.passes]


def require_private(config: TrainConfig) -> None:
    """Raise ConfigError, one line, if the training is not private."""
    if not config.privacy.enabled:
        raise ConfigError("train.privacy.enabled must be true for a privacy audit, got false")


def audit(
    config: PrivacyAuditConfig,
    training: AuditedTraining,
    train: Split,
    canaries: Canaries,
    *,
    epsilon: float,
    delta: float,
    advance: Callable[[int], object] = lambda _: None,
) -> Audit:
    """Train, and guess which canaries were in the training sets.

    Args:
        training: compiled for `train` and `canaries`.
        epsilon: claimed by each of the trainings, at `delta`.
        advance: called with the number of steps after each epoch.
    """
    all_coins, all_scores, all_fixed, all_checks, accuracies = [], [], [], [], []
    for number in range(config.trainings):
        coin_seed, training_seed = np.random.SeedSequence(config.seed, spawn_key=(1, number)).spawn(2)
        coins = np.random.default_rng(coin_seed).integers(0, 2, config.num_canaries) == 1
        seeds = map(int, training_seed.generate_state(len(_PURPOSES)))
        keys = keys_of(MemberSeeds(**dict(zip(_PURPOSES, seeds, strict=True))))
        trace = training.run(train, canaries, coins, keys=keys, advance=advance)
        ratios = log_ratios(trace, canaries.labels)
        all_coins.append(coins)
        all_scores.append(batch_scores(ratios, trace.rate))
        all_fixed.append(fixed_order_scores(ratios, training.steps_per_epoch))
        all_checks.append([*check_noise(trace), *check_batches(trace)])
        accuracies.append(trace.accuracy)

    coins, scores = np.concatenate(all_coins), np.concatenate(all_scores)
    guesses = guess(scores, coins, config.guess_share)
    level = {"delta": delta, "significance": 1 - config.confidence}
    outcomes = [guess(scores, coins, share) for share in sorted({*_SHARES, config.guess_share}, reverse=True)]
    by_fixed_order = guess(np.concatenate(all_fixed), coins, config.guess_share)
    fixed_order_bound = gaussian_bound(by_fixed_order, delta=delta, significance=_FIXED_ORDER_CHANCE)
    return Audit(
        epsilon=epsilon,
        delta=delta,
        confidence=config.confidence,
        scores=scores,
        coins=coins,
        guesses=guesses,
        lower_bound=gaussian_bound(guesses, **level),
        lower_bound_any=epsilon_bound(guesses, **level),
        by_share=[(outcome, gaussian_bound(outcome, **level)) for outcome in outcomes if outcome.guesses],
        checks=[
            *(max(checks, key=lambda check: check.excess) for checks in zip(*all_checks, strict=True)),
            Check(name="fixed_order", value=fixed_order_bound, low=0.0, high=epsilon),
        ],
        accuracy=float(np.mean(accuracies)),
    )


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
    """Return the epsilon such that the guesses refute (ε, δ)-privacy for any smaller ε, by `p_value`; 0 for none."""
    return bisect(lambda epsilon: p_value(guesses, epsilon, delta) < significance, 0.0, 100.0, halvings=_HALVINGS)[0]


def refutes(guesses: Guesses, mu: float, significance: float) -> bool:
    """Return whether a Gaussian mechanism has a chance of at most `significance` of so many correct guesses or more.

    Its noise has a standard deviation of 1 / μ sensitivities, its trade-off curve is f(α) = Φ(Φ⁻¹(1 - α) - μ)
    (arXiv 1905.02383): false positive rate → least false negative rate.

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
        least = float(ndtr(-ndtri(1 - hits) - mu))
        if least <= misses:
            return False  # nothing forces fewer correct guesses to have any chance
        hits += number / (guesses.guesses - number) * (least - misses)
        misses = least
        if hits + misses > most:
            return True
    return False


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return δ = Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2) of the Gaussian mechanism (Balle and Wang, arXiv 1805.06530)."""
    if not mu:
        return 0.0
    return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


def gaussian_bound(guesses: Guesses, *, delta: float, significance: float) -> float:
    """Return the epsilon, at delta, of the least private Gaussian mechanism that the guesses refute; 0 for none.

    A training of many noisy steps is close to one Gaussian mechanism (Dong et al., arXiv 1905.02383, section 5), so
    this is the bound for it. It is none for mechanisms in general.
    """
    mu, _ = bisect(lambda mu: refutes(guesses, mu, significance), 0.0, 20.0, halvings=_HALVINGS)
    return bisect(lambda epsilon: gaussian_delta(mu, epsilon) > delta, 0.0, 100.0, halvings=_HALVINGS)[0]


def check_noise(trace: AuditTrace) -> list[Check]:
    """Check size and independence of the noise of the first steps; a training without noise fails the first check."""
    noise = trace.noise.astype(np.float64)

    # standard deviation, over that which is accounted for
    scale = float(np.sqrt(np.mean(np.square(noise)))) if noise.size else 0.0
    margin = max(_ROUNDING, _SIGMAS / np.sqrt(2 * noise.size)) if noise.size else _ROUNDING

    # largest correlation between the noise of two steps, either sign
    correlation, largest = 0.0, 1.0
    if len(noise) > 1 and noise.any():
        directions = noise / np.sqrt(np.sum(np.square(noise), axis=1, keepdims=True))
        products = np.einsum("ak,bk->ab", directions, directions)  # no `@`: the order of sums in a BLAS varies
        correlation = float(np.abs(products[np.triu_indices(len(noise), 1)]).max())
        largest = max(_ROUNDING, _SIGMAS / np.sqrt(noise.shape[1]))

    # If one key makes the bits of noise and draws, the draw of an example and the number of the noise at the same place
    # are functions of the same bits. The mean of the noise at the places of the batch's examples, in standard errors:
    places = [indices[(indices >= 0) & (indices < noise.shape[1])] for indices in trace.batches]
    drawn = [row[place] for row, place in zip(trace.noise, places, strict=False)]
    values = np.concatenate([*drawn, np.zeros(0, np.float32)])
    mean = float(np.sum(values, dtype=np.float64) / np.sqrt(max(len(values), 1)))

    return [
        Check(name="noise_scale", value=scale, low=1 - margin, high=1 + margin),
        Check(name="noise_between_steps", value=correlation, low=0.0, high=largest),
        Check(name="noise_and_draws", value=mean, low=-_SIGMAS, high=_SIGMAS),
    ]


def check_batches(trace: AuditTrace) -> list[Check]:
    """Check the variances of batch sizes and of visits, each over that of the binomial distribution."""
    steps, rate = len(trace.batches), trace.rate
    if rate == 1:  # every example is in every batch
        return [Check(name=name, value=1.0, low=0.0, high=1.0) for name in ("batch_sizes", "visits")]
    is_example = trace.batches != PADDING

    sizes, mean = np.sum(is_example, axis=1), rate * trace.present.sum()
    size_variance = float(np.mean(np.square(sizes - mean)) / (mean * (1 - rate)))
    low, high = (float(stats.chi2.ppf(chance, steps) / steps) for chance in (_CHI2_CHANCE, 1 - _CHI2_CHANCE))

    # How often an example was in a batch: the variance is 0 if every epoch has each example once, and the number of
    # epochs if all epochs are the same. The standard error of a mean of squares includes the fourth moment.
    visits = np.bincount(trace.batches[is_example], minlength=len(trace.present))[trace.present]
    binomial = steps * rate * (1 - rate)
    visit_variance = float(np.mean(np.square(visits - steps * rate)) / binomial)
    margin = _SIGMAS * float(np.sqrt(max((2 + (1 - 6 * rate * (1 - rate)) / binomial) / len(visits), 0.0)))

    return [
        Check(name="batch_sizes", value=size_variance, low=low, high=high),
        Check(name="visits", value=visit_variance, low=1 - margin, high=1 + margin),
    ]


def write_tables(folder: Path, audit: Audit, trainings: int) -> None:
    """Write `canaries.parquet`, `bounds.csv` and `checks.csv` to a new folder."""
    folder.mkdir(parents=True)
    count = len(audit.scores) // trainings
    canaries = {
        "training": np.repeat(np.arange(trainings, dtype=np.int32), count),
        "canary": np.tile(np.arange(count, dtype=np.int32), trainings),
        "included": audit.coins,
        "score": audit.scores.astype(np.float32),
    }
    pd.DataFrame(canaries).to_parquet(folder / "canaries.parquet", index=False)
    bounds = [(outcome.guesses, outcome.correct, bound) for outcome, bound in audit.by_share]
    table = pd.DataFrame(bounds, columns=["guesses", "correct", "epsilon_lower_bound"])
    table.to_csv(folder / "bounds.csv", index=False, float_format="%.6g")
    checks = [{**vars(check), "passes": check.passes} for check in audit.checks]
    pd.DataFrame(checks).to_csv(folder / "checks.csv", index=False, float_format="%.6g")


def audit_metrics(audit: Audit) -> dict[str, float | str]:
    """Return the metrics of an audit, flat."""
    return {
        "epsilon": audit.epsilon,
        "delta": audit.delta,
        "epsilon_lower_bound": audit.lower_bound,
        "epsilon_lower_bound_any_mechanism": audit.lower_bound_any,
        "confidence": audit.confidence,
        "canaries": audit.guesses.canaries,
        "guesses": audit.guesses.guesses,
        "correct_guesses": audit.guesses.correct,
        "accuracy": audit.accuracy,
        **{f"checks/{check.name}": check.value for check in audit.checks},
        "failed_checks": sum(not check.passes for check in audit.checks),
        "faults": ", ".join(audit.faults) or "none",
    }


def write_figure(folder: Path, audit: Audit, title: str) -> None:
    """Write `privacy_audit.png`: scores of canaries, and the lower bound against the number of guesses."""
    figure, axes = plotting.new_figure(f"Privacy audit · {title}", columns=2, size=(11, 4.2))
    axis = axes[0, 0]
    low, high = np.quantile(audit.scores, [0.002, 0.998])
    edges = np.linspace(low, max(high, low + 1e-9), _HISTOGRAM_BINS + 1).tolist()
    clipped = np.clip(audit.scores, edges[0], edges[-1])
    for coin, label, colour in ((False, "not in the training set", plotting.GREY), (True, "in it", plotting.BLUE)):
        count = int((audit.coins == coin).sum())
        axis.hist(clipped[audit.coins == coin], edges, color=colour, alpha=0.55, label=f"{count:,} {label}")
    axis.set(xlabel="score: log-likelihood ratio of having been in batches", ylabel="canaries", title="Canaries")
    axis.legend(loc="upper right")

    axis = axes[0, 1]
    guesses = [outcome.guesses for outcome, _ in audit.by_share]
    bounds = [bound for _, bound in audit.by_share]
    claimed = f"claimed by the accountant: {audit.epsilon:.2f}"
    axis.axhline(audit.epsilon, color=plotting.VERMILLION, linewidth=1.5, label=claimed)
    axis.plot(guesses, bounds, color=plotting.BLUE, marker="o", markersize=4, linewidth=1, label="by number of guesses")
    chosen = f"lower bound, {audit.guesses.correct:,} of {audit.guesses.guesses:,} right: {audit.lower_bound:.2f}"
    axis.plot([audit.guesses.guesses], [audit.lower_bound], "o", color=plotting.BLUE, markersize=9, label=chosen)
    axis.set_xscale("log")
    axis.set_ylim(0, 1.35 * max(audit.epsilon, *bounds, audit.lower_bound))
    axis.set(
        xlabel="canaries that were guessed",
        ylabel=f"ε at δ = {audit.delta:g}",
        title=f"What guessing proves, with {audit.confidence:.0%} confidence",
    )
    axis.legend(loc="upper left", fontsize=9)
    plotting.save(figure, folder / "privacy_audit.png")
