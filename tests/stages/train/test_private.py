"""A private training in its stage: the secret, and the reported epsilon. Resuming one: `test_loop.py`."""

import dataclasses
import hashlib

import pytest
from factories import private_config, random_split

from gradtrail.core.train.history import EpochRecord
from gradtrail.core.train.privacy import NOT_PRIVATE, PrivacyConfig
from gradtrail.stages.train import figures, tables
from gradtrail.stages.train.secret import VARIABLE, read_secret, training_secret
from gradtrail.support.errors import UserError

SECRET = "correct horse battery staple, and more"  # noqa: S105
EPSILONS = (0.5, 0.75, 1.0)


def privacy(secret: str | None = None) -> PrivacyConfig:
    digest = secret and hashlib.sha256(secret.encode()).hexdigest()
    return dataclasses.replace(NOT_PRIVATE, enabled=True, secret_sha256=digest)


def test_secret_is_asked_for_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_secret(privacy()) is None
    assert read_secret(dataclasses.replace(privacy(SECRET), enabled=False)) is None
    with pytest.raises(UserError, match=r"^GRADTRAIL_PRIVACY_SECRET is not set"):
        read_secret(privacy(SECRET))
    monkeypatch.setenv(VARIABLE, SECRET)
    assert read_secret(privacy(SECRET)) == SECRET
    assert read_secret(privacy()) is None, "a training that asks for none has none"
    with pytest.raises(UserError, match="another SHA-256") as caught:
        read_secret(privacy("another"))
    assert SECRET not in str(caught.value)


def epochs(count: int = 3) -> list[EpochRecord]:
    names = [field.name for field in dataclasses.fields(EpochRecord) if field.name != "epoch"]
    return [EpochRecord(epoch=epoch, **dict.fromkeys(names, 0.5)) for epoch in range(1, count + 1)]


def test_epsilon_is_a_column_and_a_panel_of_private_trainings_alone() -> None:
    public, private = tables.epoch_table(epochs()), tables.epoch_table(epochs(2), EPSILONS)
    assert "epsilon" not in public
    assert private["epsilon"].tolist() == [0.5, 0.75]
    assert len(figures.draw_learning_curves(public, "title").axes) == 2
    assert [axis.get_ylabel() for axis in figures.draw_learning_curves(private, "title").axes][2:] == ["epsilon"]


def test_secret_that_could_be_found_by_its_digest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(UserError, match=r"must have at least 32 characters, got 5"):
        read_secret(privacy("short"))


def test_trainings_with_one_secret_have_secrets_of_their_own_and_members_the_same() -> None:
    config, split = private_config(), random_split(6)
    secret = training_secret(SECRET, config, split)
    assert training_secret(None, config, split) is None
    assert training_secret(SECRET, dataclasses.replace(config, seed=3, members=4), split) == secret
    other_secrets = [
        training_secret(SECRET, dataclasses.replace(config, clip_norm=0.5), split),
        training_secret(SECRET, config, random_split(7)),
        training_secret("another", config, split),
    ]
    assert len({secret, *other_secrets}) == 4
