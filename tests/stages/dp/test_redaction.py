"""The secret of a private training: checked against its digest, and different for each training."""

import dataclasses
import hashlib
import os

import pytest
from factories import private_config, random_split

from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.schedules import Cosine, Linear
from gradtrail.stages.dp.redaction import VARIABLE, training_secret
from gradtrail.support.errors import UserError

SECRET, OTHER = "correct horse battery staple, and more", "another secret, as long as the first"
SPLIT = random_split(6)


def with_secret(secret: str | None, **overrides: object) -> TrainConfig:
    digest = secret and hashlib.sha256(secret.encode()).hexdigest()
    return private_config(privacy={"secret_sha256": digest}, **overrides)


def test_secret_is_required_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_secret(SECRET)
    disabled = dataclasses.replace(config, privacy=dataclasses.replace(config.privacy, enabled=False))
    monkeypatch.delenv(VARIABLE, raising=False)
    assert training_secret(disabled, SPLIT) is None
    with pytest.raises(UserError, match=r"^GRADTRAIL_PRIVACY_SECRET is not set"):
        training_secret(config, SPLIT)
    monkeypatch.setenv(VARIABLE, SECRET)
    assert training_secret(with_secret(None), SPLIT) is None, "no digest, no secret"
    with pytest.raises(UserError, match="another SHA-256") as caught:
        training_secret(with_secret(OTHER), SPLIT)
    assert SECRET not in str(caught.value)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(UserError, match=r"must have at least 32 characters, got 5"):
        training_secret(with_secret("short"), SPLIT)


def test_trainings_differ_in_their_secret_and_members_do_not() -> None:
    """Cosine and linear schedules have the same fields; their trainings would differ by no noise."""
    config = with_secret(SECRET, schedule=Cosine(end_fraction=0.0))

    def secret(config: TrainConfig, words: str = SECRET, num_examples: int = 6) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(os.environ, VARIABLE, words)
            return training_secret(config, random_split(num_examples))

    assert secret(dataclasses.replace(config, seed=3, members=4)) == secret(config)
    secrets = [
        secret(config),
        secret(dataclasses.replace(config, clip_norm=0.5)),
        secret(dataclasses.replace(config, schedule=Linear(end_fraction=0.0))),
        secret(config, num_examples=7),
        secret(with_secret(OTHER, schedule=Cosine(end_fraction=0.0)), OTHER),
    ]
    assert len({*secrets}) == 5
