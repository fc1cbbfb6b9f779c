"""Every picture is a PNG, equal bytes twice, also where there is little to draw."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from drawing import assert_same_png_twice
from factories import (
    CONFIGURED,
    cost_rows,
    gradient_analysis,
    gradients_config,
    learning_dynamics,
    random_split,
    step_times,
    timings_of,
)

from gradtrail.core.evaluate.metrics import Evaluation, evaluate
from gradtrail.stages.evaluate import figures as evaluate_figures
from gradtrail.stages.evaluate import tables as predictions
from gradtrail.stages.gradients import figures as gradients_figures
from gradtrail.stages.gradients import tables as score_tables
from gradtrail.stages.preprocess import figures as preprocess_figures
from gradtrail.stages.profile import figures as profile_figures
from gradtrail.stages.profile import time_figures as timings_figures
from gradtrail.stages.profile import timings
from gradtrail.stages.train import figures as train_figures


def evaluation(num_examples: int, num_classes: int, *, perfect: bool = False) -> Evaluation:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(num_classes), num_examples).astype(np.float32)
    wrong = (probabilities.argmax(axis=1) + 1) % num_classes
    labels = (probabilities.argmax(axis=1) if perfect else wrong).astype(np.int32)
    return evaluate(probabilities, np.ones(num_examples, np.float32), labels, calibration_bins=3)


@pytest.mark.parametrize("num_examples", [1, 40])
def test_samples(num_examples: int, tmp_path: Path) -> None:
    split = random_split(num_examples)
    assert_same_png_twice(lambda path: preprocess_figures.draw_samples(path, split, "digits", 3, per_class=4), tmp_path)


def test_class_balance(tmp_path: Path) -> None:
    splits = {name: random_split(size, num_classes=2) for name, size in (("train", 9), ("validation", 3), ("test", 1))}
    assert_same_png_twice(lambda path: preprocess_figures.draw_class_balance(path, splits, "digits", 2), tmp_path)


@pytest.mark.parametrize("num_epochs", [1, 5])
def test_learning_curves_also_where_nothing_is_wrong(num_epochs: int, tmp_path: Path) -> None:
    columns = ("loss", "accuracy", "validation_loss", "validation_accuracy")
    epochs = pd.DataFrame({"epoch": range(1, num_epochs + 1)} | dict.fromkeys(columns, 1.0))
    assert_same_png_twice(lambda path: train_figures.draw_learning_curves(path, epochs, "title"), tmp_path)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("num_steps", [1, 250])
def test_steps(num_steps: int, clip_norm: float | None, tmp_path: Path) -> None:
    columns = {name: np.linspace(2, 1, num_steps) for name in ("loss", "grad_norm", "learning_rate")}
    steps = pd.DataFrame({"step": np.arange(1, num_steps + 1), **columns})
    assert_same_png_twice(lambda path: train_figures.draw_steps(path, steps, "title", clip_norm), tmp_path)


@pytest.mark.parametrize("skipped", [[True, False, False], [False, False, False]])
def test_steps_with_a_loss_scale(skipped: list[bool], tmp_path: Path) -> None:
    columns = {name: np.linspace(2, 1, 3) for name in ("loss", "grad_norm", "learning_rate", "loss_scale")}
    steps = pd.DataFrame({"step": [1, 2, 3], **columns, "skipped": skipped})
    steps.loc[0, "grad_norm"] = np.inf
    assert_same_png_twice(lambda path: train_figures.draw_steps(path, steps, "title", 1.0), tmp_path)


@pytest.mark.parametrize(("num_classes", "perfect"), [(10, False), (2, False), (3, True)])
def test_confusion(num_classes: int, perfect: bool, tmp_path: Path) -> None:
    confusion = evaluation(20, num_classes, perfect=perfect).confusion
    assert_same_png_twice(lambda path: evaluate_figures.draw_confusion(path, confusion, "title"), tmp_path)


@pytest.mark.parametrize("num_examples", [1, 50])
def test_reliability_also_with_empty_bins(num_examples: int, tmp_path: Path) -> None:
    bins = evaluation(num_examples, 3).reliability
    assert_same_png_twice(lambda path: evaluate_figures.draw_reliability(path, bins, "title"), tmp_path)


@pytest.mark.parametrize(("num_examples", "perfect"), [(13, False), (1, False), (5, True)])
def test_mistakes_also_where_there_are_none(num_examples: int, perfect: bool, tmp_path: Path) -> None:
    result, split = evaluation(num_examples, 3, perfect=perfect), random_split(num_examples)
    assert_same_png_twice(lambda path: evaluate_figures.draw_mistakes(path, result, split, "title", 12), tmp_path)


@pytest.mark.parametrize(("num_examples", "noisy"), [(1, False), (40, True)])
def test_gradients(num_examples: int, noisy: bool, tmp_path: Path) -> None:
    splits = {name: random_split(num_examples) for name in ("train", "test")}
    if noisy:
        wrong = dataclasses.replace(splits["train"], true_labels=np.roll(splits["train"].labels, 1))
        splits["train"] = wrong
    analysis = gradient_analysis({name: len(split) for name, split in splits.items()})
    scores = score_tables.score_table(splits, analysis.scores, learning_dynamics(num_examples))
    tables = score_tables.make_tables(scores, analysis, gradients_config())
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        gradients_figures.draw(tmp_path / name, tables, analysis, splits, "title", 128)
    names = sorted(path.name for path in (tmp_path / "left").iterdir())
    assert ("label_error_scores.png" in names) == noisy
    assert len(names) == 8 + noisy
    for name in names:
        data = (tmp_path / "left" / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert data == (tmp_path / "right" / name).read_bytes(), name


@pytest.mark.parametrize("batch_sizes", [(32,), (16, 32, 64)])
def test_costs(batch_sizes: tuple[int, ...], tmp_path: Path) -> None:
    costs = cost_rows(batch_sizes)
    assert_same_png_twice(lambda path: profile_figures.draw_costs(path, costs, CONFIGURED, "title"), tmp_path)
    assert_same_png_twice(lambda path: profile_figures.draw_fusions(path, costs, CONFIGURED, "title"), tmp_path)


@pytest.mark.parametrize("batch_sizes", [(32,), (16, 32, 64)])
def test_timings(batch_sizes: tuple[int, ...], tmp_path: Path) -> None:
    timed = timings_of(batch_sizes)
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        timings.write(tmp_path / name, timed, CONFIGURED, "title")
    written = {path.name: path.read_bytes() for path in (tmp_path / "left").iterdir()}
    pictures = {"jit", "batch_sizes", "precision_and_remat", "roofline", "where_the_time_goes"}
    assert {name for name in written if name.endswith(".png")} == {f"{name}.png" for name in pictures}
    assert all(data == (tmp_path / "right" / name).read_bytes() for name, data in written.items())


@pytest.mark.parametrize(("without_jit", "compile_seconds"), [(0.1, 2.0), (0.001, 2.0), (0.0011, 2.0)])
def test_jit_that_pays_soon_late_or_never(without_jit: float, compile_seconds: float, tmp_path: Path) -> None:
    steps = step_times(without_jit=without_jit, compile_seconds=compile_seconds)
    assert_same_png_twice(lambda path: timings_figures.draw_steps(path, steps, "title"), tmp_path)


def test_tables_of_predictions_fit_their_pictures(tmp_path: Path) -> None:
    split, result = random_split(20), evaluation(20, 3)
    predictions.write_tables(tmp_path / "evaluate", split, result, 5)
    assert len(pd.read_csv(tmp_path / "evaluate" / "mistakes.csv")) == 5
    everyone = pd.read_parquet(tmp_path / "evaluate" / "predictions.parquet")
    np.testing.assert_array_equal(everyone["example_id"], split.example_id)
