"""A stopped training resumes and ends with the bits of one that was not; the secret of a private one."""

import dataclasses
import hashlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from factories import make_engine, private_config, random_split, train_config

from gradtrail.core.nn.models import MLPConfig
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import EpochRecord, History
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.privacy import NOT_PRIVATE, PrivacyConfig
from gradtrail.core.train.pytrees import add_prefix, leaves_by_name
from gradtrail.stages.train import figures, loop, tables
from gradtrail.stages.train.checkpointing import ResumeFolder, state_on_host
from gradtrail.stages.train.loop import TrainResult
from gradtrail.stages.train.secret import VARIABLE, read_secret, training_secret
from gradtrail.support.errors import UserError
from gradtrail.support.signals import Stopped

SPLIT = random_split(10)  # three steps an epoch
CONFIGS = {
    "much at once": train_config(
        mlp=MLPConfig(hidden=(5,), activation="relu", dropout=0.5),
        average_decay=0.9,
        precision="float16",
        accumulation_steps=2,
        epochs=3,
    ),
    "early stopping": train_config(optimizer="schedule_free", patience=1, epochs=3),
}
SECRET = "correct horse battery staple, and more"  # noqa: S105
PRIVATE = train_config(epochs=3, privacy=dataclasses.replace(NOT_PRIVATE, enabled=True))


class Listener:
    """Asks the process to stop after some of its chunks, as Ctrl-C does."""

    def __init__(self, chunks: int | None):
        self.left = chunks
        self.epochs: list[int] = []

    def after_chunk(self, state: Any) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    def after_epoch(self, history: History, seconds: float) -> None:
        self.epochs.append(history.epochs[-1].epoch)

    def diverged(self, chunk: Chunk) -> None:
        pytest.fail("diverged")


def run(
    config: TrainConfig,
    folder: Path | None,
    listener: Listener,
    *,
    steps_per_call: int = 1,
    secret: str | None = None,
    epsilons: Sequence[float] = (),
) -> TrainResult:
    engine, _ = make_engine(config, SPLIT)
    checkpoints = ResumeFolder(folder, 1e9, lambda: 0.0)
    seeds = config.seeds_of(config.seed)
    member = loop.Member(seeds=seeds, checkpoints=checkpoints, secret=secret, epsilons=epsilons)
    return loop.run(engine, validate, SPLIT, config, member=member, listener=listener, steps_per_call=steps_per_call)


def validate(params: Any) -> dict[str, float]:
    """Say that no epoch is better than the first."""
    return {"loss": float(np.abs(params["layers"][0]["kernel"]).sum()), "accuracy": 0.5}


def bits(result: TrainResult) -> dict[str, bytes]:
    state = add_prefix("state", leaves_by_name(state_on_host(result.state)))
    return {name: np.asarray(leaf).tobytes() for name, leaf in (state | result.history.as_arrays()).items()}


@pytest.mark.parametrize(("name", "steps"), [("much at once", 9), ("early stopping", 6)])
def test_training_that_is_stopped_after_every_step_ends_with_the_same_bits(
    name: str, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So it does after any: what follows a resumed step depends on nothing but its checkpoint."""
    straight = run(CONFIGS[name], None, Listener(None), steps_per_call=1000)
    epochs: list[int] = []
    for step in range(1, steps + 1):
        listener = Listener(1)
        with pytest.raises(Stopped, match=f"stopped after step {step} of 9; `dvc repro` resumes from there"):
            run(CONFIGS[name], tmp_path, listener)
        epochs += listener.epochs
        assert (f"resuming after step {step - 1}, from a checkpoint" in capsys.readouterr().err) == (step > 1)
    result = run(CONFIGS[name], tmp_path, listener := Listener(1))
    assert listener.left == 1, "nothing was left to do"
    assert epochs == list(range(1, steps // 3 + 1)), "each was logged once"
    assert bits(result) == bits(straight)


def test_killed_private_training_spends_no_more_and_its_checkpoints_do_not_hold_its_keys(tmp_path: Path) -> None:
    straight = run(PRIVATE, None, Listener(None), secret=SECRET)
    engine, seeds = make_engine(PRIVATE, SPLIT)[0], PRIVATE.seeds_of(PRIVATE.seed)
    keys = keys_of(seeds, secret=SECRET)
    in_state = jax.tree.map(jax.random.key_data, engine.init(keys).keys)
    made = [*np.asarray(jax.random.key_data(keys))[[1, 4]], np.asarray(in_state.order), np.asarray(in_state.noise)]
    hidden = [SECRET.encode(), *(key.tobytes() for key in made)]
    for step, chunks in ((1, 1), (4, 3), (7, 3)):
        with pytest.raises(Stopped, match=f"stopped after step {step} "):
            run(PRIVATE, tmp_path, Listener(chunks), secret=SECRET)
        written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        assert written
        assert not any(key in content for key in hidden for content in written)
    result = run(PRIVATE, tmp_path, Listener(None), secret=SECRET)
    assert sum(len(part.loss) for part in result.history.steps) == 9, "no step was made twice"
    assert bits(result) == bits(straight)


def test_another_secret_gives_other_noise_and_the_state_does_not_show_which() -> None:
    results = [run(PRIVATE, None, Listener(None), secret=secret) for secret in (SECRET, "another", None)]
    keys = [jax.tree.leaves(state_on_host(result.state).keys) for result in results]
    assert len(keys[0]) == 4
    for each in keys[1:]:
        np.testing.assert_array_equal(each, keys[0])
    assert len({result.history.epochs[-1].loss for result in results}) == 3


def test_progress_shows_epsilon_but_no_secret(capfd: pytest.CaptureFixture[str]) -> None:
    run(PRIVATE, None, Listener(None), secret=SECRET, epsilons=(0.5, 0.75, 1.0))
    said = capfd.readouterr().err
    assert all(f"epsilon {spent} (" in said for spent in ("0.5", "0.75", "1"))
    member = loop.Member(seeds=PRIVATE.seeds_of(0), checkpoints=ResumeFolder(None, 1e9, lambda: 0.0), secret=SECRET)
    assert SECRET not in said + repr(member)


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
