"""A training that is stopped after any step resumes, and ends with the bits of one that was not."""

import dataclasses
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from factories import make_engine, random_split, train_config

from gradtrail.core.nn.models import MLPConfig
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import History
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.train.pytrees import add_prefix, leaves_by_name
from gradtrail.stages.train import loop
from gradtrail.stages.train.checkpointing import ResumeFolder, state_on_host
from gradtrail.stages.train.loop import TrainResult
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
