"""Pictures of a training: by epoch, and step by step."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradtrail.core.train.history import History
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.train.tables import epoch_table, step_table


def draw(folder: Path, history: History, title: str, clip_norm: float | None) -> None:
    """Draw all pictures of the `train` stage into a folder."""
    epochs, steps = epoch_table(history.epochs), step_table(history.steps)
    plotting.save(draw_learning_curves(epochs, title), folder / "learning_curves.png")
    plotting.save(draw_steps(steps, title, clip_norm), folder / "steps.png")


def draw_learning_curves(epochs: pd.DataFrame, title: str) -> Figure:
    """Draw loss and error of training and validation over the epochs."""
    figure, axes = plotting.new_figure(f"Learning curves · {title}", columns=2, size=(10, 4))
    for name, prefix in (("train", ""), ("validation", "validation_")):
        line = {"color": plotting.SPLIT_COLOURS[name], "label": name, "marker": "o"}
        axes[0, 0].plot(epochs["epoch"], epochs[f"{prefix}loss"], **line)
        axes[0, 1].plot(epochs["epoch"], 100 * (1 - epochs[f"{prefix}accuracy"]), **line)
    axes[0, 0].set_ylabel("loss in nats (training: with label smoothing)")
    axes[0, 1].set_ylabel("error in %")
    if (
        epochs[["accuracy", "validation_accuracy"]].to_numpy() < 1
    ).any():  # else there is no error to show on such a scale
        axes[0, 1].set_yscale("log")
    for axis in axes.flat:
        axis.set_xlabel("epoch")
        axis.legend()
    return figure


def draw_steps(steps: pd.DataFrame, title: str, clip_norm: float | None) -> Figure:
    """Draw loss, gradient norm (with the clipping threshold), learning rate and loss scale over the optimizer steps."""
    labels = {"loss": "loss in nats", "grad_norm": "gradient norm", "learning_rate": "learning rate"}
    labels |= {"loss_scale": "loss scale"} if "loss_scale" in steps else {}
    figure, axes = plotting.new_figure(f"Step by step · {title}", rows=len(labels), size=(10, 2.6 * len(labels)))
    panels = dict(zip(labels, axes[:, 0], strict=True))
    for column, axis in panels.items():
        axis.set_ylabel(labels[column])
        if column in ("loss", "grad_norm"):
            _draw_noisy(axis, steps["step"], steps[column])
        else:
            axis.plot(steps["step"], steps[column], color=plotting.BLUE)
    if clip_norm is not None:
        share = (steps["grad_norm"] > clip_norm).mean()
        label = f"clipped to {clip_norm:g}, in {share:.0%} of the steps"
        panels["grad_norm"].axhline(clip_norm, color=plotting.VERMILLION, linestyle="--", label=label)
        panels["grad_norm"].legend(loc="best")
    if "loss_scale" in steps:
        _mark_skipped(panels["loss_scale"], steps[steps["skipped"]])
    axes[-1, 0].set_xlabel("optimizer step")
    return figure


def _draw_noisy(axis: Axes, steps: pd.Series, values: pd.Series) -> None:
    """Draw what jumps from step to step faintly, and its running mean on top."""
    window = max(1, len(values) // 100)
    values = values.where(np.isfinite(values))
    axis.plot(steps, values, color=plotting.BLUE, alpha=0.25, linewidth=0.8)
    axis.plot(steps, values.rolling(window, min_periods=1).mean(), color=plotting.BLUE, label=f"mean of {window} steps")
    axis.set_yscale("log")
    axis.legend(loc="best")


def _mark_skipped(axis: Axes, skipped: pd.DataFrame) -> None:
    """Mark the steps that changed nothing."""
    axis.set_yscale("log", base=2)
    if len(skipped):
        label = f"{len(skipped)} skipped, their gradients not being finite"
        axis.plot(skipped["step"], skipped["loss_scale"], "x", color=plotting.VERMILLION, label=label)
        axis.legend(loc="best")
