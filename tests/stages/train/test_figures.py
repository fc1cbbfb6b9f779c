"""Figures of a training show its history: by epoch, and by step."""

import numpy as np
import pandas as pd
import pytest
from drawing import legend_of, lines, names, points

from gradtrail.stages.train import figures


def history(num_epochs: int, *, accuracy: float) -> pd.DataFrame:
    epochs = np.arange(1, num_epochs + 1)
    losses = {"loss": 2.0 / epochs, "cross_entropy": 2.0 / epochs, "validation_loss": 1.0 / epochs}
    return pd.DataFrame({"epoch": epochs, **losses, "accuracy": accuracy, "validation_accuracy": accuracy})


@pytest.mark.parametrize(("num_epochs", "accuracy", "scale"), [(5, 0.75, "log"), (1, 1.0, "linear")])
def test_learning_curves_are_loss_and_error_of_both_splits(num_epochs: int, accuracy: float, scale: str) -> None:
    epochs = history(num_epochs, accuracy=accuracy)
    figure = figures.draw_learning_curves(epochs, "a title")
    loss, error = figure.axes
    assert "a title" in figure.get_suptitle()
    for name, prefix in (("training", ""), ("validation", "validation_")):
        np.testing.assert_array_equal(points(lines(loss)[name]), epochs[["epoch", f"{prefix}loss"]])
        np.testing.assert_allclose(lines(error)[name].get_ydata(), 100 * (1 - accuracy))
    assert error.get_yscale() == scale
    assert [names(axis)[1] for axis in figure.axes] == ["epoch", "epoch"]
    figure.draw_without_rendering()


@pytest.mark.parametrize(("num_steps", "window", "said"), [(1, 1, "each step"), (250, 2, "mean of 2 steps")])
def test_steps_have_a_panel_for_each_column_with_a_running_mean_where_it_is_noisy(
    num_steps: int, window: int, said: str
) -> None:
    columns = {name: np.linspace(2, 1, num_steps) for name in ("loss", "grad_norm", "learning_rate")}
    steps = pd.DataFrame({"step": np.arange(1, num_steps + 1), **columns, "cross_entropy": columns["loss"]})
    figure = figures.draw_steps(steps, "a title", None)
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss in nats", "gradient norm", "learning rate"]
    for axis, column in zip(figure.axes, columns, strict=True):
        np.testing.assert_array_equal(points(axis.lines[0]), steps[["step", column]])
    mean = lines(figure.axes[0])[f"training, {said}"]
    assert points(mean)[-1, 1] == pytest.approx(steps["loss"][-window:].mean())
    figure.draw_without_rendering()


def test_with_label_smoothing_the_cross_entropy_without_it_is_drawn_too() -> None:
    epochs = history(3, accuracy=0.9).assign(cross_entropy=[0.5, 0.2, 0.1])
    loss, _ = figures.draw_learning_curves(epochs, "a title").axes
    names_of_losses = ["training (cross-entropy)", "training (with label smoothing)", "validation"]
    assert legend_of(loss) == names_of_losses
    for name, column in zip(names_of_losses, ("cross_entropy", "loss", "validation_loss"), strict=True):
        np.testing.assert_array_equal(points(lines(loss)[name]), epochs[["epoch", column]])
    steps = epochs.rename(columns={"epoch": "step"}).assign(grad_norm=1.0, learning_rate=0.1)
    drawn = figures.draw_steps(steps, "a title", None).axes[0]
    assert legend_of(drawn) == [f"{name}, each step" for name in names_of_losses[:2]]


@pytest.mark.parametrize("skipped", [[True, False, False], [False, False, False]])
def test_the_clipping_threshold_and_skipped_steps_are_marked(skipped: list[bool]) -> None:
    columns = {name: [4.0, 2.0, 1.0] for name in ("loss", "cross_entropy", "learning_rate", "loss_scale")}
    steps = pd.DataFrame({"step": [1, 2, 3], **columns, "grad_norm": [np.inf, 2.0, 0.5], "skipped": skipped})
    figure = figures.draw_steps(steps, "a title", 1.0)
    _, norm, _, scale = figure.axes
    threshold = lines(norm)["clipped to 1, in 67% of the steps"]
    assert threshold.get_ydata() == [1.0, 1.0]
    assert np.isnan(points(norm.lines[0])[0, 1]), "an infinite norm has no place"
    marks = [entry for entry in legend_of(scale) if "skipped" in entry]
    assert len(marks) == any(skipped)
    for entry in marks:
        assert points(lines(scale)[entry]).tolist() == [[1, 4]]
    figure.draw_without_rendering()
