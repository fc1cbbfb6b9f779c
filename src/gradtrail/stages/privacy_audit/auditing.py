"""A privacy audit: trainings with canaries, guesses of their membership, and the resulting bounds on epsilon."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from gradtrail.core.canaries import Canaries, draw_membership, make_canaries
from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split
from gradtrail.core.privacy_audit.config import PrivacyAuditConfig
from gradtrail.core.privacy_audit.scores import batch_scores, fixed_order_scores, guess
from gradtrail.core.privacy_audit.training import AuditProgram, AuditTrace, run_audited_training
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.keys import keys_of
from gradtrail.stages.privacy_audit.bounds import (
    Guesses,
    epsilon_bound,
    gaussian_bound,
)
from gradtrail.stages.privacy_audit.checks import Check, check_training

_CHANCE = 1e-6  # of a false alarm in a check
_PURPOSES = ("initialization", "order", "augmentation", "dropout", "noise")
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01)  # shares of the canaries in the figure


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The guarantee of each of the audited trainings: it is (epsilon, delta)-private."""

    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit.

    Attributes:
        by_share: guesses and `lower_bound` for other shares, each evaluated alone.
    """

    claim: Claim  # the audited guarantee
    confidence: float  # confidence of the lower bounds
    scores: Float[np.ndarray, " canaries"]  # score of every canary of every training
    coins: Bool[np.ndarray, " canaries"]  # True if the canary was in the training set
    guesses: Guesses  # guesses for the configured share of the canaries, by `scores`
    lower_bound: float  # lower bound on epsilon, by the trade-off curve of Gaussian noise (arXiv 2410.22235)
    lower_bound_any: float  # lower bound on epsilon for any mechanism (arXiv 2305.08846)
    by_share: tuple[tuple[Guesses, float], ...]
    checks: tuple[Check, ...]  # checks of the trainings, the worst result of each
    accuracy: float  # accuracy on the batches of the last epoch, mean over the trainings

    @property
    def faults(self) -> list[str]:
        """The names of the results that contradict the guarantee; empty if there are none."""
        names = ["epsilon_lower_bound"] if max(self.lower_bound, self.lower_bound_any) > self.claim.epsilon else []
        return names + [check.name for check in self.checks if not check.passes]


def require_private(config: TrainConfig) -> None:
    """Raise ConfigError, one line, if the training is not private."""
    if not config.privacy.enabled:
        raise ConfigError("train.privacy.enabled must be true for a privacy audit, got false")


def draw_canaries(config: PrivacyAuditConfig, train: Split, num_classes: int) -> Canaries:
    """Draw the canaries of all trainings; raise ConfigError, one line, if there are too few examples."""
    rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(0,)))
    try:
        return make_canaries(train, config.canaries, config.num_canaries, num_classes, rng=rng)
    except ValueError as error:
        raise ConfigError(f"privacy_audit.{error}") from None


def audit(
    config: PrivacyAuditConfig,
    watched: AuditProgram,
    train: Split,
    canaries: Canaries,
    claim: Claim,
    advance: Callable[[int], object] = lambda _: None,
) -> Audit:
    """Train, and guess which canaries were in the training sets.

    Args:
        config: number of trainings, and of guesses.
        watched: program compiled for `train` and `canaries`.
        train: the training split.
        canaries: canaries of `draw_canaries`.
        claim: guarantee of each of the trainings.
        advance: function that is called with the number of steps after each epoch.
    """
    coins, scores, fixed, checks, accuracies = [], [], [], [], []
    for number in range(config.trainings):
        of_coins, of_training = np.random.SeedSequence(config.seed, spawn_key=(1, number)).spawn(2)
        coins.append(draw_membership(len(canaries), rng=np.random.default_rng(of_coins)))
        seeds = zip(_PURPOSES, map(int, of_training.generate_state(len(_PURPOSES))), strict=True)
        keys = keys_of(MemberSeeds(**dict(seeds)))
        trace: AuditTrace = run_audited_training(watched, train, canaries, coins[-1], keys=keys, advance=advance)
        scores.append(batch_scores(trace.products, canaries.labels, trace.rate))
        fixed.append(fixed_order_scores(trace.products, canaries.labels, watched.training.steps_per_epoch))
        checks.append(check_training(trace))
        accuracies.append(trace.accuracy)
    every_coin, every_score = np.concatenate(coins), np.concatenate(scores)
    guesses = _guesses(every_score, every_coin, config.guess_share)
    of_fixed = _guesses(np.concatenate(fixed), every_coin, config.guess_share)
    bound = gaussian_bound(of_fixed, delta=claim.delta, significance=_CHANCE)
    shares = sorted({*_SHARES, config.guess_share}, reverse=True)
    by_share_guesses = [_guesses(every_score, every_coin, share) for share in shares]
    level = {"delta": claim.delta, "significance": 1 - config.confidence}
    return Audit(
        claim=claim,
        confidence=config.confidence,
        scores=every_score,
        coins=every_coin,
        guesses=guesses,
        lower_bound=gaussian_bound(guesses, **level),
        lower_bound_any=epsilon_bound(guesses, **level),
        by_share=tuple((trace, gaussian_bound(trace, **level)) for trace in by_share_guesses if trace.guesses),
        checks=(
            *(_worst(same_check) for same_check in zip(*checks, strict=True)),
            Check(name="fixed_order", value=bound, low=0.0, high=claim.epsilon),
        ),
        accuracy=float(np.mean(accuracies)),
    )


def _guesses(scores: Float[np.ndarray, " canaries"], coins: Bool[np.ndarray, " canaries"], share: float) -> Guesses:
    count, correct = guess(scores, coins, round(share * len(scores)))
    return Guesses(canaries=len(scores), guesses=count, correct=correct)


def _worst(checks: Sequence[Check]) -> Check:
    """Return the check that is nearest to a limit, or farthest beyond it."""
    return max(checks, key=lambda check: max(check.low - check.value, check.value - check.high))
