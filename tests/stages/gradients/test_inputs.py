"""The outputs of a training read back unchanged; a missing or damaged file is an error of one line."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from factories import (
    dataset_info,
    gradients_config,
    make_engine,
    model_config,
    new_compiler,
    params_on_device,
    random_split,
    seed_keys,
    train_config,
)

from gradtrail.core.gradients import analysis
from gradtrail.core.gradients.analysis import Trajectory
from gradtrail.core.gradients.passes import compile_passes
from gradtrail.core.nn.models import Model
from gradtrail.core.train.history import History, on_host
from gradtrail.stages.gradients.inputs import (
    choose_examples,
    read_dynamics,
    read_members,
    take_train,
)
from gradtrail.stages.model.members import member_folder, write_seeds
from gradtrail.stages.train import tables
from gradtrail.support.errors import UserError

SPLIT = random_split(10)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `train` writes, after three epochs of which 0 and 2 are kept."""
    folder = tmp_path_factory.mktemp("trained")
    engine, examples = make_engine(train_config(epochs=3), SPLIT)
    state = engine.init(seed_keys(0))
    history = History((0, 2), on_host(state.params), len(SPLIT))
    for chunk in engine.train(state, examples, steps_per_call=100):
        if chunk.ends_epoch:
            history.add(chunk, on_host(chunk.state.params), {"loss": 1.0, "accuracy": 0.1 * chunk.epoch})
    tables.write_all_weights(folder / "models", history, model_config(), train_config().loss, dataset_info())
    tables.write_tables(folder / "results", history, SPLIT.example_id)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy, to damage."""
    return Path(shutil.copytree(trained, tmp_path / "trained"))


def test_trajectory_has_the_kept_epochs_and_the_scored_one(folder: Path) -> None:
    write_seeds(folder / "models", [0])
    (member,) = read_members(folder / "models", folder / "results", "final", dataset_info(), SPLIT)
    trajectory = member.trajectory
    assert member.model.config == model_config()
    assert member.about.epoch == trajectory.scored == 3
    assert sorted(trajectory.params) == [0, 2, 3]
    assert trajectory.batch_size == 4


def test_dynamics_come_in_the_order_of_the_split(folder: Path) -> None:
    result = read_dynamics(folder / "results", SPLIT)
    assert result["first_correct_epoch"].max() <= 3
    with pytest.raises(UserError, match=r"dynamics\.parquet: has other examples than the training split"):
        read_dynamics(folder / "results", random_split(9))


def as_members(trained: Path, folder: Path, seeds: tuple[int, ...]) -> Path:
    """Return a folder with as many members, all with the files of one training."""
    for name in ("models", "results"):
        for seed in seeds:
            shutil.copytree(trained / name, member_folder(folder / name, seed))
    write_seeds(folder / "models", seeds)
    return folder


def test_members_are_read_one_after_the_other(trained: Path, folder: Path, tmp_path: Path) -> None:
    both = as_members(trained, tmp_path / "both", (3, 4))
    members = read_members(both / "models", both / "results", "final", dataset_info(), SPLIT)
    first = next(members)
    (member_folder(both / "models", 4) / "final.safetensors").unlink()
    assert (first.seed, first.about.epoch) == (3, 3)
    with pytest.raises(UserError, match=r"seed_4/final\.safetensors: no such file"):
        next(members)
    write_seeds(folder / "models", [3])
    (alone,) = read_members(folder / "models", folder / "results", "final", dataset_info(), SPLIT)
    assert alone.seed == 3
    np.testing.assert_array_equal(alone.dynamics["mean_probability"], first.dynamics["mean_probability"])


def test_even_sample_is_chosen_and_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(analysis, "_SMALLEST_SAMPLE", 20)
    model = Model(model_config("linear"))
    splits = {"train": random_split(60), "test": random_split(9)}
    params = dict.fromkeys(range(20), params_on_device(model))
    trajectory = Trajectory(params=params, scored=19, batch_size=4)
    passes = compile_passes(model, train_config().loss, compiler=new_compiler())
    for affordable, stride, announced in (
        (1e12, 1, "69 examples x 20 kept epochs"),
        (0, 3, r"29 examples x 20 kept epochs, 20 of 60 in training \(.*\)"),
    ):
        monkeypatch.setattr(analysis, "_AFFORDABLE_FLOPS", affordable)
        sample = take_train(splits, choose_examples(passes, gradients_config(), splits, trajectory))["train"]
        np.testing.assert_array_equal(sample.example_id, splits["train"].example_id[::stride])
        (line,) = capsys.readouterr().err.splitlines()
        assert re.fullmatch(rf"gradients: {announced}: about \d+ s", line)
