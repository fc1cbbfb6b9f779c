"""What a private training tells: its promise, and if it is to be published nothing of its examples without noise.

What comes from the validation split stays, which a private training does not protect.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.dynamics import LearningDynamics
from gradtrail.core.train.history import History
from gradtrail.core.train.privacy import PrivacyConfig
from gradtrail.core.train.step import StepRecord
from gradtrail.stages.artifacts.privacy import PrivacyGuarantee

# Of steps and of epochs; the gradient norms of steps stay: they are those of noised sums
WITHHELD = ("loss", "cross_entropy", "accuracy")
_BLANK: dict[str, Any] = dict.fromkeys(WITHHELD, float("nan"))


def guarantee_of(config: TrainConfig, spent: Mapping[str, float], *, num_examples: int, steps: int) -> PrivacyGuarantee:
    """Return what a private training promises.

    Args:
        config: of the training.
        spent: metrics of `accounting.Spending.measure`.
        num_examples: of the training split.
        steps: of all members together.
    """
    privacy = config.privacy
    rounded = {name: float(f"{value:.9g}") for name, value in spent.items()}  # as in the metrics
    return PrivacyGuarantee(
        **{"epsilon_each": rounded["epsilon"], **rounded},
        example_clip_norm=privacy.example_clip_norm,
        sampling=privacy.sampling,
        batch_size=config.batch_size,
        num_examples=num_examples,
        steps=steps,
        members=config.members,
        augmentation_multiplicity=privacy.augmentation_multiplicity,
        has_secret=privacy.secret_sha256 is not None,
        release=privacy.release,
    )


def to_publish(history: History, privacy: PrivacyConfig) -> History:
    """Return the history that outputs and runs may tell: of a private training with `release`, a copy without the rest.

    Its losses and accuracies are NaN, its batches have 0 examples, and its learning dynamics are those of no example.
    """
    if not (privacy.enabled and privacy.release):
        return history
    found = copy.copy(history)
    found.epochs = [dataclasses.replace(each, **_BLANK) for each in history.epochs]
    found.steps = [steps_to_publish(part, privacy) for part in history.steps]
    found.dynamics = None if history.dynamics is None else LearningDynamics(0)
    return found


def steps_to_publish(steps: StepRecord, privacy: PrivacyConfig) -> StepRecord:
    """Return the records of steps, on the host, that runs may tell; see `to_publish`."""
    if not (privacy.enabled and privacy.release):
        return steps
    blank: dict[str, Any] = {name: np.full_like(getattr(steps, name), np.nan) for name in WITHHELD}
    blank["num_examples"] = np.zeros_like(steps.num_examples)
    return dataclasses.replace(steps, **blank, rows=None)
