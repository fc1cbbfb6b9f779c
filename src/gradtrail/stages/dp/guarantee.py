"""The guarantee of a private training: `results/train/privacy.json`, which only private trainings have.

`train` writes it next to the tables. `gradients` and `report` read it, to redact or to mark what it does not cover.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradtrail.stages.common.files import read_json, write_json
from gradtrail.stages.common.params import validate

_FILE = "privacy.json"
NOT_COVERED = (
    "Not covered by epsilon: the training is private, but what follows was computed from single training examples "
    "without noise. Do not publish it; train.privacy.release leaves it out."
)
REDACTED = (
    "The training is private and its outs are to be published, so nothing here was computed from training examples "
    "but with the noise: they are left out."
)


@dataclass(frozen=True, kw_only=True)
class PrivacyGuarantee:
    """The differential privacy of each training example, and the settings behind it."""

    epsilon: float  # upper bound for all members together, by privacy loss distributions
    epsilon_each: float  # the largest epsilon of one member; for a single member the same
    epsilon_rdp: float  # looser upper bound for all members together, by Rényi differential privacy
    delta: float  # chance that epsilon does not hold
    noise_multiplier: float  # standard deviation of the noise over the clip norm
    example_clip_norm: float  # L2 norm to which larger gradients of an example are scaled down
    sampling: Literal["poisson"]
    batch_size: int  # mean number of examples in a batch
    num_examples: int  # size of the training split
    steps: int  # number of steps of all members together
    members: int  # number of networks; their steps compose
    augmentation_multiplicity: int  # augmentations of an example whose mean gradient is clipped
    has_secret: bool  # True if batches and noise come from a secret; else from the seed, which anybody can repeat
    release: bool  # True if the outputs are redacted: they hold nothing of training examples without noise

    @property
    def rate(self) -> float:
        """The chance of an example to be in a batch."""
        return self.batch_size / self.num_examples

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the training; `epsilon_each` for several members only."""
        names = ["epsilon", "epsilon_each", "epsilon_rdp", "delta", "noise_multiplier"]
        return {name: getattr(self, name) for name in names if self.members > 1 or name != "epsilon_each"}


def write_guarantee(folder: Path, guarantee: PrivacyGuarantee) -> None:
    """Write the guarantee to the results of a training."""
    write_json(folder / _FILE, dataclasses.asdict(guarantee))


def read_guarantee(folder: Path) -> PrivacyGuarantee | None:
    """Read the guarantee of the training with these results; None if it is not private.

    Raises:
        UserError: the file is damaged; one line.
    """
    path = folder / _FILE
    return validate(read_json(path), PrivacyGuarantee, f"{path}: privacy") if path.is_file() else None
