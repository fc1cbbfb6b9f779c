"""The secret of a private training, read from the environment, and the redaction of what its noise does not cover."""

import copy
import hashlib
import json
import os
from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np

from gradtrail.core.data import Split
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import EpochMetrics, History, LearningDynamics, StepMetrics
from gradtrail.core.train.privacy import PrivacyConfig
from gradtrail.stages.common.params import as_written
from gradtrail.support.errors import UserError

VARIABLE = "GRADTRAIL_PRIVACY_SECRET"
_FEWEST = 32  # characters: a shorter one could be found by its digest
_MEMBER_KEYS = ("seed", "members", "vary")  # params that select members
# The columns of a training to publish, and no others: results on the validation split, which a private training does
# not protect; gradient norms of steps, which are those of noised sums; and what no example has a part in.
PUBLIC_OF_EPOCHS = frozenset({"epoch", "validation_loss", "validation_accuracy"})
PUBLIC_OF_STEPS = frozenset({"grad_norm", "learning_rate"})
_Metrics = TypeVar("_Metrics", EpochMetrics, StepMetrics)


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


def is_redacted(privacy: PrivacyConfig) -> bool:
    """Whether the outputs of a training are to be published: then they hold what its noise covers, and nothing else."""
    return privacy.enabled and privacy.release


def redacted_history(history: History, privacy: PrivacyConfig) -> History:
    """Return the publishable history: for a private training with `release` a redacted copy, else the history itself.

    Columns of epochs and steps are blank unless they are public, and the learning dynamics have no examples.
    """
    if not is_redacted(privacy):
        return history
    result = copy.copy(history)
    result.epochs = [_redacted(record, PUBLIC_OF_EPOCHS) for record in history.epochs]
    result.steps = [_redacted(part, PUBLIC_OF_STEPS) for part in history.steps]
    result.dynamics = LearningDynamics(0)
    return result


def redacted_steps(steps: StepMetrics, privacy: PrivacyConfig) -> StepMetrics:
    """Return the publishable metrics of steps, on the host; see `redacted_history`."""
    return _redacted(steps, PUBLIC_OF_STEPS) if is_redacted(privacy) else steps


def _redacted(metrics: _Metrics, public: Collection[str]) -> _Metrics:
    """Return the metrics with NaN in place of each number that is not public, 0 in place of whole numbers."""
    return {name: value if name in public else _blank(value) for name, value in metrics.items()}


def _blank(value: Any) -> Any:
    blank = np.full_like(value, np.nan if np.asarray(value).dtype.kind == "f" else 0)
    return blank if isinstance(value, np.ndarray) else blank.item()
