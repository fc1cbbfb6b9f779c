"""The privacy guarantee of a training, and the redaction of everything computed from its examples without noise.

Results on the validation split stay, which a private training does not protect.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import History, LearningDynamics
from gradtrail.core.train.privacy import PrivacyConfig
from gradtrail.core.train.step import StepRecord
from gradtrail.stages.artifacts.privacy import PrivacyGuarantee

# Columns of steps and of epochs. The gradient norms of steps stay, as they are of noised sums
WITHHELD = ("loss", "cross_entropy", "accuracy")
_BLANK: dict[str, Any] = dict.fromkeys(WITHHELD, float("nan"))


def guarantee_of(config: TrainConfig, spent: Mapping[str, float], *, num_examples: int, steps: int) -> PrivacyGuarantee:
    """Return the guarantee of a private training.

    Args:
        config: params of the training.
        spent: metrics of `accounting.Spending.measure`.
        num_examples: size of the training split.
        steps: number of steps of all members together.
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


def redacted_history(history: History, privacy: PrivacyConfig) -> History:
    """Return the publishable history: for a private training with `release` a redacted copy, else the history itself.

    Losses and accuracies are NaN, batches have 0 examples, and the learning dynamics have no examples.
    """
    if not (privacy.enabled and privacy.release):
        return history
    result = copy.copy(history)
    result.epochs = [dataclasses.replace(record, **_BLANK) for record in history.epochs]
    result.steps = [redacted_steps(part, privacy) for part in history.steps]
    result.dynamics = LearningDynamics(0)
    return result


def redacted_steps(steps: StepRecord, privacy: PrivacyConfig) -> StepRecord:
    """Return the publishable records of steps, on the host; see `redacted_history`."""
    if not (privacy.enabled and privacy.release):
        return steps
    blank: dict[str, Any] = {name: np.full_like(getattr(steps, name), np.nan) for name in WITHHELD}
    blank["num_examples"] = np.zeros_like(steps.num_examples)
    return dataclasses.replace(steps, **blank, rows=None)
