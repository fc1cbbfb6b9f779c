"""What a private training promises: `results/train/privacy.json`, which only private trainings have.

`train` writes it beside the tables. `gradients` and `report` read it, to leave out or to mark what the promise does not
cover.
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
RELEASED = (
    "The training is private and its outs are to be published, so nothing here was computed from training examples "
    "but with the noise: they are left out."
)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a private training promises of each of its examples, and by what.

    Attributes:
        epsilon: of all members together, by privacy loss distributions; an upper bound.
        epsilon_each: the largest that one member has by itself; of a single member the same.
        epsilon_rdp: of all members together, by Rényi differential privacy; a looser upper bound.
        delta: chance that epsilon does not hold.
        noise_multiplier: standard deviation of the noise over the clip norm.
        example_clip_norm: L2 norm to which larger gradients of an example are scaled down.
        sampling: how batches are drawn.
        batch_size: mean number of examples in a batch.
        num_examples: of the training split.
        steps: of all members together.
        members: number of networks; their steps compose.
        augmentation_multiplicity: augmentations of an example whose mean gradient is clipped.
        has_secret: whether batches and noise come from a secret; else from the seed, which anybody can repeat.
        release: whether the outs have nothing of training examples but what the noise covers.
    """

    epsilon: float
    epsilon_each: float
    epsilon_rdp: float
    delta: float
    noise_multiplier: float
    example_clip_norm: float
    sampling: Literal["poisson"]
    batch_size: int
    num_examples: int
    steps: int
    members: int
    augmentation_multiplicity: int
    has_secret: bool
    release: bool

    @property
    def rate(self) -> float:
        """Chance of an example to be in a batch."""
        return self.batch_size / self.num_examples


def write_promise(folder: Path, promise: Promise) -> None:
    """Write what a training promises to its results."""
    write_json(folder / _FILE, dataclasses.asdict(promise))


def read_promise(folder: Path) -> Promise | None:
    """Read what the training with these results promises; None where it is not private.

    Raises:
        UserError: the file is damaged; one line.
    """
    path = folder / _FILE
    return validate(read_json(path), Promise, f"{path}: privacy") if path.is_file() else None
