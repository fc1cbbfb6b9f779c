"""A lower bound on epsilon from guesses: which canaries of a training set were in it?

Each of m canaries is put into the training set by an independent fair coin. An auditor sees the outputs of the
training, guesses the coins of r canaries and is right v times. The guarantee under audit bounds the probability of
that, whatever the auditor does and however the guesses depend on each other. Of several trainings with coins of their
own the canaries are counted together, m in all: a coin has a part in one training alone, so all of them as one
mechanism have the guarantee of each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import optimize
from scipy.special import ndtr, ndtri

from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split
from gradtrail.core.privacy_audit import AuditedTraining, Canaries, Coins, PrivacyAuditConfig, Scores
from gradtrail.core.train.config import VARIED, MemberSeeds, TrainConfig
from gradtrail.core.train.keys import keys_of
from gradtrail.stages.common import plotting
from gradtrail.stages.dp.accounting import gaussian_epsilon

_PURPOSES = (*VARIED, "noise")  # of `MemberSeeds`
_LARGEST_MU = 20.0
_HISTOGRAM_BINS = 40


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The outcome of guessing the coins of the canaries of all trainings together."""

    canaries: int  # m, number of canaries
    guesses: int  # r, number of guesses; for the other canaries the guesser abstained
    correct: int  # v, number of correct guesses


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit of trainings that claim to be (epsilon, delta)-private each."""

    epsilon: float
    delta: float
    confidence: float  # confidence of the lower bound
    scores: Scores  # score of every canary of every training
    coins: Coins  # True if the canary was in the training set
    guesses: Guesses
    lower_bound: float  # lower bound on epsilon

    def metrics(self) -> dict[str, float]:
        """Return flat metrics."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "epsilon_lower_bound": self.lower_bound,
            "confidence": self.confidence,
            "canaries": self.guesses.canaries,
            "guesses": self.guesses.guesses,
            "correct_guesses": self.guesses.correct,
        }


def require_private(config: TrainConfig) -> None:
    """Raise ConfigError, one line, if the training is not private, or starts from weights."""
    if not config.privacy.enabled:
        raise ConfigError("train.privacy.enabled must be true for a privacy audit, got false")
    if config.start.enabled:
        raise ConfigError(f"train.start.weights must be empty for a privacy audit, got {config.start.weights}")


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
    all_coins, all_scores = [], []
    for number in range(config.trainings):
        coin_seed, training_seed = np.random.SeedSequence(config.seed, spawn_key=(1, number)).spawn(2)
        coins = np.random.default_rng(coin_seed).integers(0, 2, config.num_canaries) == 1
        seeds = map(int, training_seed.generate_state(len(_PURPOSES)))
        keys = keys_of(MemberSeeds(**dict(zip(_PURPOSES, seeds, strict=True))))
        all_coins.append(coins)
        all_scores.append(training.run(train, canaries, coins, keys=keys, advance=advance))
    coins, scores = np.concatenate(all_coins), np.concatenate(all_scores)
    guesses = guess(scores, coins, config.guess_share)
    return Audit(
        epsilon=epsilon,
        delta=delta,
        confidence=config.confidence,
        scores=scores,
        coins=coins,
        guesses=guesses,
        lower_bound=gaussian_bound(guesses, delta=delta, significance=1 - config.confidence),
    )


def guess(scores: Scores, coins: Coins, share: float) -> Guesses:
    """Guess the coins of a share of the canaries: true for the largest scores, false for as many of the smallest."""
    count = round(share * len(scores))
    order = np.argsort(-scores, kind="stable")
    inside, outside = order[: (count + 1) // 2], order[len(order) - count // 2 :]
    return Guesses(canaries=len(scores), guesses=count, correct=int(coins[inside].sum() + (~coins[outside]).sum()))


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
    for number in range(guesses.correct - 1, -1, -1):
        fewest_misses = float(ndtr(-ndtri(1 - hits) - mu))
        if fewest_misses <= misses:
            return False  # nothing forces fewer correct guesses to have any chance
        hits += number / (guesses.guesses - number) * (fewest_misses - misses)
        misses = fewest_misses
        if hits + misses > guesses.guesses / guesses.canaries:
            return True
    return False


def gaussian_bound(guesses: Guesses, *, delta: float, significance: float) -> float:
    """Return the epsilon, at delta, of the least private Gaussian mechanism that the guesses refute; 0 for none.

    A training of many noisy steps is close to one Gaussian mechanism (Dong et al., arXiv 1905.02383, section 5), so
    this is the bound for it. It is none for mechanisms in general.
    """
    if not refutes(guesses, 0.0, significance):
        return 0.0
    mu = optimize.bisect(lambda mu: 0.5 - refutes(guesses, mu, significance), 0.0, _LARGEST_MU)
    return gaussian_epsilon(mu, delta)


def write_results(folder: Path, audit: Audit, trainings: int, title: str) -> None:
    """Write `canaries.parquet` and `privacy_audit.png`, the distribution of the scores, to a new folder."""
    folder.mkdir(parents=True)
    count = len(audit.scores) // trainings
    canaries = {
        "training": np.repeat(np.arange(trainings, dtype=np.int32), count),
        "canary": np.tile(np.arange(count, dtype=np.int32), trainings),
        "included": audit.coins,
        "score": audit.scores.astype(np.float32),
    }
    pd.DataFrame(canaries).to_parquet(folder / "canaries.parquet", index=False)

    figure, axes = plotting.new_figure(f"Privacy audit · {title}", size=(6.5, 4.2))
    low, high = np.quantile(audit.scores, [0.002, 0.998])
    edges = np.linspace(low, max(high, low + 1e-9), _HISTOGRAM_BINS + 1).tolist()
    clipped = np.clip(audit.scores, edges[0], edges[-1])
    for coin, label, colour in ((False, "not in the training set", plotting.GREY), (True, "in it", plotting.BLUE)):
        is_shown = audit.coins == coin
        axes[0, 0].hist(clipped[is_shown], edges, color=colour, alpha=0.55, label=f"{is_shown.sum():,} {label}")
    axes[0, 0].set(
        xlabel="score: log-likelihood ratio of having been in batches",
        ylabel="canaries",
        title=f"{audit.guesses.correct:,} of {audit.guesses.guesses:,} guesses right: ε ≥ {audit.lower_bound:.2f} with "
        f"{audit.confidence:.0%} confidence\nclaimed: ε = {audit.epsilon:.2f} at δ = {audit.delta:g}",
    )
    axes[0, 0].legend(loc="upper right")
    plotting.save(figure, folder / "privacy_audit.png")
