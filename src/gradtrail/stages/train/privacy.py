"""The secret of a private training, read from the environment, and the redaction of what its noise does not cover."""

import copy
import dataclasses
import hashlib
import json
import os
from typing import Any

import numpy as np

from gradtrail.core.data import Split
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import History, LearningDynamics
from gradtrail.core.train.privacy import PrivacyConfig
from gradtrail.core.train.step import StepRecord
from gradtrail.stages.common.params import as_written
from gradtrail.support.errors import UserError

VARIABLE = "GRADTRAIL_PRIVACY_SECRET"
_FEWEST = 32  # characters: a shorter one could be found by its digest
_MEMBER_KEYS = ("seed", "members", "vary")  # params that select members
# Columns of steps and of epochs that are redacted. Results on the validation split stay, which a private training does
# not protect, and so do the gradient norms of steps, which are those of noised sums.
REDACTED_COLUMNS = ("loss", "cross_entropy", "accuracy")


def training_secret(config: TrainConfig, train: Split) -> str | None:
    """Return a secret for one training alone; None if the params name no digest of a secret.

    It covers params and examples: otherwise two trainings with the same secret would have the same noise, and their
    difference none. Params that select members are ignored, so that a member has the bits of a training of its own.

    Raises:
        UserError: the variable is missing, or its SHA-256 differs; one line, which does not show the secret.
    """
    privacy = config.privacy
    if not privacy.enabled or privacy.secret_sha256 is None:
        return None
    secret = os.environ.get(VARIABLE)
    if not secret:
        raise UserError(f"{VARIABLE} is not set: train.privacy.secret_sha256 requires the secret with that digest")
    if hashlib.sha256(os.fsencode(secret)).hexdigest() != privacy.secret_sha256:
        raise UserError(f"{VARIABLE} has another SHA-256 than train.privacy.secret_sha256")
    if len(secret) < _FEWEST:
        raise UserError(f"{VARIABLE} must have at least {_FEWEST} characters, got {len(secret)}: its digest is public")
    params = {name: value for name, value in as_written(config).items() if name not in _MEMBER_KEYS}
    sha256 = hashlib.sha256(json.dumps(params, sort_keys=True).encode())
    for array in (train.images, train.labels):
        sha256.update(np.ascontiguousarray(array).tobytes())
    return f"{secret}:{sha256.hexdigest()}"


def redacted_history(history: History, privacy: PrivacyConfig) -> History:
    """Return the publishable history: for a private training with `release` a redacted copy, else the history itself.

    Losses and accuracies are NaN, batches have 0 examples, and the learning dynamics have no examples.
    """
    if not (privacy.enabled and privacy.release):
        return history
    result = copy.copy(history)
    blank: dict[str, Any] = dict.fromkeys(REDACTED_COLUMNS, float("nan"))
    result.epochs = [dataclasses.replace(record, **blank) for record in history.epochs]
    result.steps = [redacted_steps(part, privacy) for part in history.steps]
    result.dynamics = LearningDynamics(0)
    return result


def redacted_steps(steps: StepRecord, privacy: PrivacyConfig) -> StepRecord:
    """Return the publishable records of steps, on the host; see `redacted_history`."""
    if not (privacy.enabled and privacy.release):
        return steps
    blank: dict[str, Any] = {name: np.full_like(getattr(steps, name), np.nan) for name in REDACTED_COLUMNS}
    blank["num_examples"] = np.zeros_like(steps.num_examples)
    return dataclasses.replace(steps, **blank, rows=None)
