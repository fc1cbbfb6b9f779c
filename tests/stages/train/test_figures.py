"""Figures of a training show its history: by epoch, and by step."""

import numpy as np
import pandas as pd
import pytest
from drawing import lines, names, points

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


@pytest.mark.parametrize(("num_steps", "window", "message"), [(1, 1, "each step"), (250, 2, "mean of 2 steps")])
def test_steps_figure_has_panel_per_column_and_running_mean(num_steps: int, window: int, message: str) -> None:
    columns = {name: np.linspace(2, 1, num_steps) for name in ("loss", "grad_norm", "learning_rate")}
    steps = pd.DataFrame({"step": np.arange(1, num_steps + 1), **columns, "cross_entropy": columns["loss"]})
    figure = figures.draw_steps(steps, "a title", None)
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss in nats", "gradient norm", "learning rate"]
    for axis, column in zip(figure.axes, columns, strict=True):
        np.testing.assert_array_equal(points(axis.lines[0]), steps[["step", column]])
    mean = lines(figure.axes[0])[f"training, {message}"]
    assert points(mean)[-1, 1] == pytest.approx(steps["loss"][-window:].mean())
    figure.draw_without_rendering()
