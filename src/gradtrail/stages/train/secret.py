"""The secret behind the batches and the noise of a private training: read from the environment, never stored."""

import hashlib
import json
import os

import numpy as np

from gradtrail.core.data import Split
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.privacy import PrivacyConfig
from gradtrail.stages.common.params import as_written
from gradtrail.support.errors import UserError

VARIABLE = "GRADTRAIL_PRIVACY_SECRET"
_FEWEST = 32  # characters: a shorter one could be found by its digest
_MEMBER_KEYS = ("seed", "members", "vary")  # params that select members


def read_secret(privacy: PrivacyConfig) -> str | None:
    """Return the secret of a private training from the environment; None if the params name no digest.

    Raises:
        UserError: the variable is missing, or its SHA-256 differs; one line, which does not show the secret.
    """
    if not privacy.enabled or privacy.secret_sha256 is None:
        return None
    secret = os.environ.get(VARIABLE)
    if not secret:
        raise UserError(f"{VARIABLE} is not set: train.privacy.secret_sha256 requires the secret with that digest")
    if hashlib.sha256(os.fsencode(secret)).hexdigest() != privacy.secret_sha256:
        raise UserError(f"{VARIABLE} has another SHA-256 than train.privacy.secret_sha256")
    if len(secret) < _FEWEST:
        raise UserError(f"{VARIABLE} must have at least {_FEWEST} characters, got {len(secret)}: its digest is public")
    return secret


def training_secret(secret: str | None, config: TrainConfig, train: Split) -> str | None:
    """Return a secret for one training alone; None for none.

    Otherwise trainings with other params or examples and the same secret would have the same noise, and their
    difference none. Params that select members are ignored, so that a member has the bits of a training of its own.
    """
    if secret is None:
        return None
    params = {name: value for name, value in as_written(config).items() if name not in _MEMBER_KEYS}
    sha256 = hashlib.sha256(json.dumps(params, sort_keys=True).encode())
    for array in (train.images, train.labels):
        sha256.update(np.ascontiguousarray(array).tobytes())
    return f"{secret}:{sha256.hexdigest()}"
