"""Tables hold every step and epoch, curves are thinned, and a training to publish shows nothing of its examples."""

import copy
import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from factories import dataset_info, make_engine, model_config, random_split, seed_keys, train_config

from gradtrail.core import noise_scale
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import EPOCH_METRICS, History, on_host
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.stages.dp.redaction import redacted_history
from gradtrail.stages.model.weights import read_weights
from gradtrail.stages.train import figures, tables
from gradtrail.tracking import render
from gradtrail.tracking.training_log import live_curves

NORMS = ("part_grad_norm", "grad_norm")
IDS = np.arange(100, 110, dtype=np.int32)  # of the examples of the split


def trained(config: TrainConfig, kept: tuple[int, ...] = ()) -> History:
    engine, examples = make_engine(config, random_split(10))
    state = engine.init(seed_keys(0))
    history = History(kept, on_host(state.params), 10)
    for chunk in engine.train(state, examples, steps_per_call=1):
        if chunk.ends_epoch:
            history.add(chunk, on_host(chunk.state.params), {"loss": 1.0, "accuracy": 1 / 3})
    return history


@pytest.fixture(scope="module")
def history() -> History:
    return trained(train_config(), kept=(0, 1))


def test_tables_come_back_with_every_step_and_epoch(history: History, tmp_path: Path) -> None:
    tables.write_tables(tmp_path, history, IDS)
    epochs, steps = pd.read_csv(tmp_path / "epochs.csv"), pd.read_parquet(tmp_path / "steps.parquet")
    assert epochs["epoch"].tolist() == [1, 2]
    assert epochs["loss"].tolist() == pytest.approx([epoch["loss"] for epoch in history.epochs], rel=1e-8)
    assert steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(steps["loss"], np.concatenate([part["loss"] for part in history.steps]))
    metrics = {"loss", "cross_entropy", "accuracy", "clipped", "grad_norm", "learning_rate"}
    assert set(steps.columns) == {"step", "num_examples", *metrics}
    assert epochs["cross_entropy"].tolist() == pytest.approx(steps["cross_entropy"].to_numpy().reshape(2, 3).mean(1))


def test_loss_scales_and_skipped_steps_are_on_record(tmp_path: Path) -> None:
    """Two epochs in float16: one step of the first overflows, two of the second."""
    config = train_config(precision="float16", epochs=2)
    config = dataclasses.replace(config, loss_scaling=dataclasses.replace(config.loss_scaling, initial=1e38))
    engine, examples = make_engine(config, random_split(10))
    state = engine.init(seed_keys(0))
    history, live = History((), on_host(state.params), 10), []
    for chunk in engine.train(state, examples, steps_per_call=3):
        skipped = np.array([True, False, chunk.epoch == 2])
        changes = {"skipped": skipped, "grad_norm": np.where(skipped, np.float32(np.inf), np.float32(1))}
        records = dataclasses.replace(chunk.records, metrics=chunk.records.metrics | changes)
        done = dataclasses.replace(chunk, records=records)
        history.add(done, on_host(chunk.state.params), {"loss": 1.0, "accuracy": 1 / 3})
        live.append(live_curves(history, 6)["train/skipped_steps"])
    steps = tables.step_table(history.steps)
    assert steps["skipped"].tolist() == [True, False, False, True, False, True]
    assert live == [{1: 1.0}, {2: 3.0}]
    tables.write_tables(tmp_path, history, IDS)
    metrics = tables.measure(history, train_config(), 6)
    assert render.read_curves(tmp_path, "train", metrics)["train/skipped_steps"] == {
        1: 1.0,
        2: metrics["skipped_steps"],
    }
    assert "train/skipped_steps" not in render.read_curves(tmp_path, "train", metrics | {"members": 2})
    assert (steps["loss_scale"] > 0).all()
    assert metrics["skipped_steps"] == 3
    assert metrics["loss_scale"] == steps["loss_scale"].iloc[-1]


def test_weights_are_written_under_the_names_of_their_epochs(history: History, tmp_path: Path) -> None:
    tables.write_all_weights(tmp_path, history, model_config(), train_config().loss, dataset_info())
    epochs = {
        path.relative_to(tmp_path).as_posix(): read_weights(path)[2].epoch for path in tmp_path.rglob("*.safetensors")
    }
    assert epochs == {
        "final.safetensors": 2,
        "best.safetensors": 1,
        "epochs/000.safetensors": 0,
        "epochs/001.safetensors": 1,
    }


@pytest.mark.parametrize(("num_steps", "num_points"), [(6, 6), (200, 200), (399, 399), (400, 200), (5000, 200)])
def test_curves_show_all_steps_of_a_short_training_and_some_200_of_a_long_one(num_steps: int, num_points: int) -> None:
    steps = pd.DataFrame({name: np.arange(1, num_steps + 1) for name in ("step", "loss", "grad_norm", "learning_rate")})
    epochs = pd.DataFrame({"epoch": [1, 2], "loss": [3.0, 2.0]})
    curves = render.curves(epochs, steps, num_steps)
    assert curves["train/loss"] == {1: 3.0, 2: 2.0}
    assert len(curves["steps/loss"]) == num_points
    assert all(step == value for step, value in curves["steps/grad_norm"].items())
    half = render.curves(epochs, steps[: num_steps // 2], num_steps)
    assert half["steps/loss"].items() <= curves["steps/loss"].items(), "a live curve is the beginning of the last one"


def test_live_curves_equal_tables(history: History, tmp_path: Path) -> None:
    tables.write_tables(tmp_path, history, IDS)
    later = render.read_curves(tmp_path, "train", {"planned_steps": 6})
    first = copy.copy(history)
    first.epochs, first.steps = history.epochs[:1], history.steps[:1]
    parts = [live_curves(part, 6) for part in (first, history)]
    assert later.keys() == parts[0].keys()
    for name in later:
        assert later[name] == pytest.approx(parts[0][name] | parts[1][name], rel=1e-8)
        assert not parts[0][name].keys() & parts[1][name].keys()


def test_metrics_of_a_training(history: History) -> None:
    metrics = tables.measure(history, train_config(), 9)
    assert metrics["loss"] == history.epochs[-1]["loss"]
    assert metrics["num_parameters"] == 12 * 5 + 5 + 5 * 3 + 3
    assert (metrics["epochs"], metrics["steps"], metrics["planned_steps"], metrics["best_epoch"]) == (2, 6, 9, 1)
    assert metrics["best_validation_accuracy"] == pytest.approx(1 / 3)


def test_noise_scale_is_measured_if_batches_have_parts(history: History) -> None:
    assert tables.measure_noise_scale(history, 4, 1) == {}
    in_parts = trained(train_config(epochs=3, accumulation_steps=2))
    assert all(len(part["part_grad_norm"]) == 3 for part in in_parts.steps)
    metrics = tables.measure_noise_scale(in_parts, 4, 2)
    columns = [np.concatenate([part[name][:2] for part in in_parts.steps]) for name in NORMS]  # full batches
    trace, squared_norm = noise_scale.from_two_batch_sizes(*columns, small_size=2, large_size=4)
    expected = trace / np.where(squared_norm > 0, squared_norm, np.nan)
    assert metrics == ({"noise_scale": pytest.approx(np.nanmean(expected))} if (squared_norm > 0).any() else {})
    assert tables.measure_noise_scale(in_parts, 8, 2) == {}, "no batch is full, as where examples were removed"


PRIVATE = dataclasses.replace(NOT_PRIVATE, enabled=True)
PUBLISHED = dataclasses.replace(PRIVATE, release=True, secret_sha256="0" * 64)
WRITTEN = ("epochs.csv", "steps.parquet", "dynamics.parquet", "learning_curves.png", "steps.png", "parameters.csv")


def with_other_examples(history: History, number: int) -> History:
    """The same training as far as the noise covers it, on other examples, with metrics that nobody has added yet."""
    changed = copy.deepcopy(history)
    columns = ("loss", "cross_entropy", "accuracy")
    later = {"later": np.full(3, number, np.float32), "later_count": np.full(3, number)}
    changed.epochs = [
        epoch | dict.fromkeys(columns, number / 9) | {"later": number / 9, "later_count": number}
        for epoch in changed.epochs
    ]
    changed.steps = [
        part | {name: part[name] + number for name in (*columns, "num_examples")} | later for part in changed.steps
    ]
    changed.dynamics.forgetting_events += number
    changed.dynamics.sum += number / 4
    return changed


def write(history: History, folder: Path, *, drawn: bool = False) -> dict[str, str]:
    tables.write_tables(folder, history, IDS)
    if drawn:
        figures.draw(folder, tables.epoch_table(history.epochs), tables.step_table(history.steps), "a title", None)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_published_files_do_not_depend_on_examples(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column that someone adds to the records is not published, unless it is added to those that are."""
    monkeypatch.setattr(tables, "EPOCH_METRICS", (*EPOCH_METRICS, "later", "later_count"))
    both = [with_other_examples(history, number) for number in (1, 2)]
    ours, theirs = (
        write(redacted_history(one, PUBLISHED), tmp_path / str(n), drawn=True) for n, one in enumerate(both)
    )
    assert ours == theirs
    assert set(ours) == set(WRITTEN)
    ours, theirs = (write(redacted_history(one, PRIVATE), tmp_path / f"{n} of before") for n, one in enumerate(both))
    assert {name for name in ours if ours[name] != theirs[name]} == {"epochs.csv", "steps.parquet", "dynamics.parquet"}
    assert redacted_history(history, NOT_PRIVATE) is history
    config = train_config(privacy=PUBLISHED)
    published = [tables.measure(redacted_history(one, PUBLISHED), config, 6) for one in both]
    assert published[0] == published[1]
    withheld = {*tables.measure(both[0], train_config(), 6)} - {*published[0]}
    assert withheld == {"loss", "cross_entropy", "accuracy", "clipped", "later", "later_count"}
    assert published[0]["validation_accuracy"] == 1 / 3


def test_tables_to_publish_have_their_schema(history: History, tmp_path: Path) -> None:
    for privacy, name in ((NOT_PRIVATE, "all"), (PUBLISHED, "published")):
        write(redacted_history(history, privacy), tmp_path / name)
    for name in ("dynamics.parquet", "steps.parquet"):
        schemas = [pq.read_schema(tmp_path / folder / name) for folder in ("all", "published")]
        assert schemas[0].equals(schemas[1]), name
    assert len(pd.read_parquet(tmp_path / "published/dynamics.parquet")) == 0
    whole, blank = (pd.read_csv(tmp_path / folder / "epochs.csv") for folder in ("all", "published"))
    assert list(whole) == list(blank)
    pd.testing.assert_frame_equal(whole.iloc[:, 5:], blank.iloc[:, 5:])
    assert len(history.dynamics.forgetting_events) == 10, "the history itself is as before"


def test_curves_to_publish_have_no_losses_of_examples(history: History, tmp_path: Path) -> None:
    write(redacted_history(history, PUBLISHED), tmp_path)
    curves = render.read_curves(tmp_path, "train", {"planned_steps": 6})
    names = {name for name, points in curves.items() if points}
    assert names == {"train/validation_loss", "train/validation_accuracy", "steps/grad_norm", "steps/learning_rate"}
