"""A training goes on from any of its checkpoints to the same bits; damage is told of and passed over."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from factories import make_engine, random_split, train_config

from gradtrail.core.nn.models import MLPConfig
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import History, on_host
from gradtrail.core.train.loop import Chunk, train
from gradtrail.stages.train.checkpointing import Progress, ResumeFolder

SPLIT = random_split(10)  # three steps an epoch
CONFIGS = {
    "dropout and average": train_config(mlp=MLPConfig(hidden=(5,), dropout=0.5), average_decay=0.9, epochs=3),
    "float16 in parts": train_config(precision="float16", accumulation_steps=2, epochs=3),
    "schedule-free": train_config(optimizer="schedule_free", epochs=3),
}
PLAIN = CONFIGS["dropout and average"]


def follow(config: TrainConfig, on_chunk: Callable[[Chunk, History], None], before: Progress | None = None) -> History:
    """Train to the end, from the beginning or from a checkpoint; hand over every step."""
    engine, examples = make_engine(config, SPLIT)
    state = engine.init(jax.random.key(0))
    history = before.history if before else History(config.keep_epochs, on_host(state.params))
    state, records = (before.state, before.records) if before else (state, None)
    for chunk in train(engine, state, examples, steps_per_call=1, records=records):
        if chunk.ends_epoch:
            params = on_host(engine.evaluation_params(chunk.state))
            history.add(chunk, params, {"loss": 1.0, "accuracy": 0.1 * (chunk.epoch % 2)})
        on_chunk(chunk, history)
    return history


def load(folder: ResumeFolder, config: TrainConfig) -> Progress | None:
    engine, _ = make_engine(config, SPLIT)
    state = engine.init(jax.random.key(0))
    history_of = functools.partial(History.from_arrays, config.keep_epochs, on_host(state.params))
    return folder.load(state, engine.records(), history_of)


def bits(history: History) -> Any:
    return {name: (values.dtype, values.shape, values.tobytes()) for name, values in history.as_arrays().items()}


def make_folder(path: Path, every_seconds: float = 0.0) -> ResumeFolder:
    return ResumeFolder(path, every_seconds, lambda: 0.0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("step", [1, 3, 4, 8])
def test_a_training_goes_on_to_the_same_bits(name: str, step: int, tmp_path: Path) -> None:
    config, folder = CONFIGS[name], make_folder(tmp_path)

    def save(chunk: Chunk, history: History) -> None:
        if chunk.step == step:
            folder.save(chunk, history, seconds=2.5)

    straight = follow(config, save)
    before = load(folder, config)
    assert before is not None
    assert (before.step, before.seconds) == (step, 2.5)
    assert (before.records is None) == (step % 3 == 0)
    assert bits(follow(config, lambda *_: None, before)) == bits(straight)


def test_checkpoints_are_written_in_the_background_and_the_last_two_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path)

    def tick(chunk: Chunk, history: History) -> None:
        folder.tick(chunk, history, seconds=0.0)
        folder._finish_writing()

    follow(PLAIN, tick)
    assert sorted(path.name for path in tmp_path.glob("step_*.digest")) == [
        "step_000000008.digest",
        "step_000000009.digest",
    ]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step_000000008", "step_000000009"]
    assert load(folder, PLAIN).step == 9
    assert capsys.readouterr().err == "train: going on after step 9, from a checkpoint\n"
    folder.remove()
    assert not tmp_path.exists()


def test_none_is_written_before_its_time(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "here", every_seconds=1.0)
    follow(PLAIN, functools.partial(folder.tick, seconds=0.0))
    assert not (tmp_path / "here").exists()
    assert load(folder, PLAIN) is None


@pytest.fixture
def written(tmp_path: Path) -> ResumeFolder:
    """Checkpoints after the steps 4 and 5."""
    folder = make_folder(tmp_path)

    def save(chunk: Chunk, history: History) -> None:
        if chunk.step in (4, 5):
            folder.save(chunk, history, seconds=0.0)

    follow(PLAIN, save)
    return folder


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_used(
    damage: Callable[[Path], None], written: ResumeFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(largest_file(tmp_path / "step_000000005"))
    assert load(written, PLAIN).step == 4
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("train: step_000000005 is no whole checkpoint (")
    assert told[1] == "train: going on after step 4, from a checkpoint"


def test_one_without_its_seal_was_cut_off_and_counts_for_nothing(written: ResumeFolder, tmp_path: Path) -> None:
    (tmp_path / "step_000000005.digest").unlink()
    assert load(written, PLAIN).step == 4


def test_where_all_are_damaged_the_training_begins_anew(written: ResumeFolder, tmp_path: Path) -> None:
    for name in ("step_000000004", "step_000000005"):
        flip(largest_file(tmp_path / name))
    assert load(written, PLAIN) is None


def test_a_checkpoint_of_another_training_is_not_used(
    written: ResumeFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    other = dataclasses.replace(PLAIN, mlp=MLPConfig(hidden=(6,), dropout=0.5))
    assert load(written, other) is None
    assert "is no whole checkpoint (leaf 0" in capsys.readouterr().err


def test_a_disk_that_takes_nothing_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    folder = make_folder(tmp_path / "file" / "below")
    assert len(follow(PLAIN, functools.partial(folder.save, seconds=0.0)).epochs) == 3
    assert "train: warning: a checkpoint could not be written: " in capsys.readouterr().err
