"""The section `privacy_audit` of `params.yaml`: the canaries, and what is guessed of them."""

from dataclasses import dataclass

from gradtrail.core.canaries import CanaryKind
from gradtrail.core.common.validation import POSITIVE_SHARE, SEED, check_fields


@dataclass(frozen=True, kw_only=True)
class PrivacyAuditConfig:
    """An audit of the private training of the section `train`."""

    seed: int  # seed of canaries, coins and trainings
    trainings: int  # number of trainings, with different coins
    canaries: CanaryKind  # kind of canaries; see `make_canaries`
    num_canaries: int  # number of canaries; about half of them are in each training set
    guess_share: float  # share of the canaries whose coins are guessed, the most extreme scores; fixed in advance
    confidence: float  # confidence level of the lower bound of epsilon

    def __post_init__(self) -> None:
        check_fields(
            self,
            seed=SEED,
            trainings={"at_least": 1, "at_most": 1000},
            num_canaries={"at_least": 20, "at_most": 100_000},
            guess_share={"above": 0, "at_most": 1},
            confidence={**POSITIVE_SHARE, "at_least": 0.5},
        )
