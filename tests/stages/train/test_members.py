"""Members of a training are what trainings by themselves would be, and what is said of all is the mean over them."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factories import dataset_info, make_engine, model_config, random_split, train_config
from scipy import stats

from gradtrail.core.nn.models import MLPConfig
from gradtrail.core.train.config import VARIED, MemberSeeds, TrainConfig
from gradtrail.stages.artifacts.members import over_members, read_folders, read_seeds, spread
from gradtrail.stages.common.digests import digest
from gradtrail.stages.train import loop, members
from gradtrail.stages.train.checkpointing import ResumeFolder
from gradtrail.support.errors import UserError
from gradtrail.support.signals import Stopped

SPLIT = random_split(10)
CONFIG = train_config(mlp=MLPConfig(hidden=(5,), activation="relu", dropout=0.5), epochs=2, keep_epochs=(0, 1))


class Stopping:
    """Asks the process to stop after some chunks, as Ctrl-C does."""

    def __init__(self, chunks: int = -1):
        self.left = chunks

    def after_chunk(self, state: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def after_epoch(self, history: Any, seconds: float) -> None: ...

    def diverged(self, chunk: Any) -> None: ...


def train(config: TrainConfig, to: Path, checkpoints: Path | None = None, *, chunks: int = -1) -> Path:
    """Train all members; return the folder of the outs."""

    @contextlib.contextmanager
    def folder(seeds: MemberSeeds) -> Iterator[ResumeFolder]:
        yield ResumeFolder(checkpoints and checkpoints / str(seeds), 1e9, lambda: 0.0)

    def validate(params: Any) -> dict[str, float]:
        return {"loss": float(np.abs(params["layers"][0]["kernel"]).sum()), "accuracy": 0.5}

    engine, _ = make_engine(dataclasses.replace(config, seed=0, members=1, vary=VARIED), SPLIT)
    shared = loop.Members(checkpoints=folder)
    results = loop.train_members(
        engine, validate, SPLIT, config, members=shared, listener=Stopping(chunks), steps_per_call=2
    )
    _, written = members.write_each(to / "scratch", results, model_config(), config, dataset_info(), SPLIT.example_id)
    members.write_members(to, written)
    return to


def bytes_in(folder: Path) -> dict[str, str]:
    own = (path for path in folder.rglob("*") if path.is_file() and "members" not in path.parts)
    return {path.relative_to(folder).as_posix(): digest(path) for path in own}


def test_a_member_has_the_bytes_of_the_training_with_its_seed(tmp_path: Path) -> None:
    several = train(dataclasses.replace(CONFIG, seed=3, members=3), tmp_path / "several")
    assert read_seeds(several / "models") == [3, 4, 5]
    found = []
    for seed in (3, 4, 5):
        alone = train(dataclasses.replace(CONFIG, seed=seed), tmp_path / f"alone {seed}")
        for out in ("models", "results/train"):
            folder = read_folders(several / out, several / "models")[seed]
            member = {path.relative_to(folder).as_posix(): digest(path) for path in folder.rglob("*") if path.is_file()}
            assert member == bytes_in(alone / out)
            assert read_folders(alone / out, alone / "models") == {seed: alone / out}
        found.append(digest(alone / "models" / "final.safetensors"))
    assert len({*found}) == 3
    assert digest(several / "models" / "final.safetensors") == found[0]


def test_what_is_not_varied_is_that_of_the_seed() -> None:
    config = dataclasses.replace(CONFIG, seed=1, members=3, vary=("order", "dropout"))
    assert [dataclasses.astuple(config.seeds_of(seed)) for seed in config.seeds] == [
        (1, 1, 1, 1, None),
        (1, 2, 1, 2, None),
        (1, 3, 1, 3, None),
    ]


@pytest.mark.parametrize(("vary", "differ"), [("initialization", {0, 2}), ("order", {2}), ("dropout", {2})])
def test_each_purpose_has_its_own_seed(vary: Any, differ: set[int], tmp_path: Path) -> None:
    """With another seed for one purpose the initial weights stay, or the order, or else only the result differs."""
    config = dataclasses.replace(CONFIG, members=2, vary=(vary,))
    folders = read_folders(train(config, tmp_path) / "models", tmp_path / "models").values()
    initial, final = (
        {digest(folder / name) for folder in folders} for name in ("epochs/000.safetensors", "final.safetensors")
    )
    assert (len(initial) == 2) == (0 in differ)
    assert len(final) == 2


def test_one_more_member_trains_one_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(dataclasses.replace(CONFIG, members=2), tmp_path / "two", tmp_path / "checkpoints")
    capsys.readouterr()
    three = train(dataclasses.replace(CONFIG, members=3), tmp_path / "three", tmp_path / "checkpoints")
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "checkpoint" in line] == [
        f"train seed {seed}: trained before, from a checkpoint" for seed in (0, 1)
    ]
    assert {line.partition(":")[0] for line in said if "epoch" in line} == {"train seed 2"}
    anew = train(dataclasses.replace(CONFIG, members=3), tmp_path / "anew")
    for out in ("models", "results"):
        assert digest(three / out) == digest(anew / out)


def test_a_training_that_is_stopped_in_any_member_ends_with_the_same_bytes(tmp_path: Path) -> None:
    config, to, checkpoints = dataclasses.replace(CONFIG, members=2), tmp_path / "stopped", tmp_path / "checkpoints"
    for number, chunks in enumerate((1, 2, 2, 3)):  # a member has four: in the first twice, then in the second
        with pytest.raises(Stopped):
            train(config, tmp_path / f"stopped {number}", checkpoints, chunks=chunks)
    train(config, to, checkpoints)
    straight = train(config, tmp_path / "straight")
    for out in ("models", "results"):
        assert digest(to / out) == digest(straight / out)


def test_the_table_of_epochs_is_the_mean_with_its_interval(tmp_path: Path) -> None:
    folder = train(dataclasses.replace(CONFIG, members=3), tmp_path) / "results" / "train"
    own = [pd.read_csv(path / "epochs.csv") for path in read_folders(folder, tmp_path / "models").values()]
    mean = pd.read_csv(folder / "epochs.csv")
    assert mean["epoch"].tolist() == [1, 2]
    losses = np.array([table["loss"] for table in own])
    np.testing.assert_allclose(mean["loss"], losses.mean(axis=0), rtol=1e-8)
    low, high = stats.t.interval(0.95, 2, losses.mean(axis=0), stats.sem(losses, axis=0))
    np.testing.assert_allclose(mean[["loss_low", "loss_high"]].to_numpy().T, [low, high], rtol=1e-7)


def test_metrics_are_means_with_their_spread() -> None:
    each = [
        {"dataset": "mnist", "steps": 5, "loss": loss, "loss_low": 0.0, "loss_high": 1.0, "best_epoch": epoch}
        for loss, epoch in ((0.1, 1), (0.2, 1), (0.6, 2))
    ]
    assert over_members(each[:1]) == each[0]
    found = over_members(each)
    assert (found["members"], found["dataset"], found["steps"]) == (3, "mnist", 5)
    assert found["loss"] == pytest.approx(0.3)
    assert found["loss_sd"] == pytest.approx(np.std([0.1, 0.2, 0.6], ddof=1))
    expected = stats.t.interval(0.95, 2, 0.3, stats.sem([0.1, 0.2, 0.6]))
    assert (found["loss_low"], found["loss_high"]) == pytest.approx((0.0, expected[1]))
    assert found["best_epoch"] == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("name", "values", "ends"),
    [
        ("accuracy", (0.82, 0.99), (0.0, 1.0)),
        ("expected_calibration_error_uncalibrated", (0.01, 0.2), (0.0, 1.0)),
        ("label_errors_false_negative_rate", (0.01, 0.9), (0.0, 1.0)),
        ("first_grad_norm_rank_correlation_input_norm", (0.9, -0.9), (-1.0, 1.0)),
        ("validation_loss", (0.1, 0.9), (0.0, 5.58)),
        ("coherence_across_classes", (0.1, 0.9), (-4.58, 5.58)),
    ],
)
def test_the_interval_of_a_mean_ends_at_possible_values(
    name: str, values: tuple[float, float], ends: tuple[float, float]
) -> None:
    found = spread(name, values)
    assert (found.low, found.high) == pytest.approx(ends, abs=0.01)


def test_more_members_than_the_disk_holds_are_refused_with_how_many_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    each = (4 + 10) * 4 * 1000 + 32 * 10  # four files of 1,000 parameters, ten copies in a checkpoint, ten examples
    fitting = 1_000_000 // each
    members.require_space(tmp_path, dataclasses.replace(CONFIG, members=fitting), 1000, 10)
    members.require_space(tmp_path, dataclasses.replace(CONFIG, members=1), 10**9, 10)
    with pytest.raises(
        UserError,
        match=rf"^train\.members: {fitting + 1} members take .* GB of disk space are free; at most {fitting} fit$",
    ):
        members.require_space(tmp_path, dataclasses.replace(CONFIG, members=fitting + 1), 1000, 10)
