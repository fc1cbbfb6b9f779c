"""A history's tables hold every step and epoch; curves are thinned, at the same steps live and later."""

from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from factories import dataset_info, make_engine, model_config, random_split, train_config

from gradtrail.core.history import History
from gradtrail.core.training import train
from gradtrail.io import curves as curve_tables
from gradtrail.io import histories
from gradtrail.io.weights import read_weights


@pytest.fixture(scope="module")
def history() -> History:
    engine, examples = make_engine(train_config(), random_split(10))
    state = engine.init(jax.random.key(0))
    history = History((0, 1), state.params)
    for chunk in train(engine, state, examples, steps_per_call=1):
        if chunk.ends_epoch:
            history.add(chunk, {"loss": 1.0, "accuracy": 1 / 3})
    return history


def test_tables_come_back_with_every_step_and_epoch(history: History, tmp_path: Path) -> None:
    histories.write_tables(tmp_path, history)
    epochs, steps = curve_tables.read_tables(tmp_path)
    assert epochs["epoch"].tolist() == [1, 2]
    assert epochs["loss"].tolist() == pytest.approx([record.loss for record in history.epochs], rel=1e-8)
    assert steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(steps["loss"], np.concatenate([part.loss for part in history.steps]))
    assert set(steps.columns) == {"step", "loss", "accuracy", "grad_norm", "learning_rate"}


def test_equal_histories_are_equal_bytes(history: History, tmp_path: Path) -> None:
    for name in ("left", "right"):
        histories.write_tables(tmp_path / name, history)
        histories.write_all_weights(tmp_path / name, history, model_config(), 0.1, dataset_info())
    names = sorted(path.relative_to(tmp_path / "left") for path in (tmp_path / "left").rglob("*.*"))
    assert len(names) == 6
    for name in names:
        assert (tmp_path / "left" / name).read_bytes() == (tmp_path / "right" / name).read_bytes()


def test_weights_are_written_under_the_names_of_their_epochs(history: History, tmp_path: Path) -> None:
    histories.write_all_weights(tmp_path, history, model_config(), 0.1, dataset_info())
    epochs = {
        path.relative_to(tmp_path).as_posix(): read_weights(path)[2].epoch for path in tmp_path.rglob("*.safetensors")
    }
    assert epochs == {
        "final.safetensors": 2,
        "best.safetensors": 1,
        "epochs/000.safetensors": 0,
        "epochs/001.safetensors": 1,
    }


@pytest.mark.parametrize(("num_steps", "shown"), [(6, 6), (200, 200), (399, 399), (400, 200), (5000, 200)])
def test_curves_show_all_steps_of_a_short_training_and_some_200_of_a_long_one(num_steps: int, shown: int) -> None:
    steps = pd.DataFrame({name: np.arange(1, num_steps + 1) for name in ("step", "loss", "grad_norm", "learning_rate")})
    epochs = pd.DataFrame({"epoch": [1, 2], "loss": [3.0, 2.0]})
    curves = curve_tables.curves(epochs, steps, num_steps)
    assert curves["train/loss"] == {1: 3.0, 2: 2.0}
    assert len(curves["steps/loss"]) == shown
    assert all(step == value for step, value in curves["steps/grad_norm"].items())
    half = curve_tables.curves(epochs, steps[: num_steps // 2], num_steps)
    assert half["steps/loss"].items() <= curves["steps/loss"].items(), "a live curve is the beginning of the last one"


def test_live_curves_equal_those_of_the_tables(history: History, tmp_path: Path) -> None:
    histories.write_tables(tmp_path, history)
    later = curve_tables.curves(*curve_tables.read_tables(tmp_path), num_steps=6)
    live = histories.live_curves(history, 6)
    assert later.keys() == live.keys()
    for name in later:
        assert later[name] == pytest.approx(live[name], rel=1e-8)


def test_metrics_of_a_training(history: History) -> None:
    metrics = histories.measure(history)
    assert metrics["loss"] == history.epochs[-1].loss
    assert metrics["num_parameters"] == 12 * 5 + 5 + 5 * 3 + 3
    assert (metrics["epochs"], metrics["steps"], metrics["best_epoch"]) == (2, 6, 1)
    assert metrics["best_validation_accuracy"] == pytest.approx(1 / 3)
