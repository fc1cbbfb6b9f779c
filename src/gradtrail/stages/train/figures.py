"""Figures of a training: by epoch, and by optimizer step."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradtrail.stages.common import plotting


def draw(folder: Path, epochs: pd.DataFrame, steps: pd.DataFrame, title: str, clip_norm: float | None) -> None:
    """Draw all figures of the `train` stage into a folder; the steps are those of the first member."""
    plotting.save(draw_learning_curves(epochs, title), folder / "learning_curves.png")
    plotting.save(draw_steps(steps, title, clip_norm), folder / "steps.png")


def draw_learning_curves(epochs: pd.DataFrame, title: str) -> Figure:
    """Draw loss and error of training and validation over the epochs, with the intervals of means over members.

    For a private training also epsilon, of one member.
    """
    panels = 3 if "epsilon" in epochs else 2
    figure, axes = plotting.new_figure(f"Learning curves · {title}", columns=panels, size=(5 * panels, 4))
    train, validation = ({"color": plotting.SPLIT_COLOURS[name], "marker": "o"} for name in ("train", "validation"))
    has_losses = _has_training_losses(epochs)
    for (column, label), style in zip(_losses(epochs).items() if has_losses else (), ("-", ":"), strict=False):
        axes[0, 0].plot(epochs["epoch"], epochs[column], label=label, linestyle=style, **train)
    axes[0, 0].plot(epochs["epoch"], epochs["validation_loss"], label="validation", **validation)
    if has_losses:
        axes[0, 1].plot(epochs["epoch"], 100 * (1 - epochs["accuracy"]), label="training", **train)
    axes[0, 1].plot(epochs["epoch"], 100 * (1 - epochs["validation_accuracy"]), label="validation", **validation)
    if "validation_loss_low" in epochs:
        low, high = (
            {"loss": epochs[f"validation_loss_{end}"], "accuracy": 100 * (1 - epochs[f"validation_accuracy_{end}"])}
            for end in ("low", "high")
        )
        for axis, name in zip(axes[0, :2], low, strict=True):
            axis.fill_between(
                epochs["epoch"], low[name], high[name], color=validation["color"], alpha=0.25, linewidth=0
            )
    axes[0, 0].set(ylabel="loss in nats", ylim=(0, None))
    axes[0, 1].set_ylabel("error in %")
    if (epochs[["accuracy", "validation_accuracy"]].to_numpy() < 1).any():  # otherwise no error is positive
        axes[0, 1].set_yscale("log")
    if "epsilon" in epochs:
        axes[0, 2].plot(epochs["epoch"], epochs["epsilon"], label="spent, at most", color=plotting.BLUE, marker="o")
        axes[0, 2].set(ylabel="epsilon", ylim=(0, None))
    for axis in axes.flat:
        axis.set_xlabel("epoch")
        axis.legend()
    return figure


def draw_steps(steps: pd.DataFrame, title: str, clip_norm: float | None) -> Figure:
    """Draw loss, gradient norm (with the clipping threshold), learning rate and loss scale over the optimizer steps."""
    labels = {"loss": "loss in nats", "grad_norm": "gradient norm", "learning_rate": "learning rate"}
    labels |= {"loss_scale": "loss scale"} if "loss_scale" in steps else {}
    if not _has_training_losses(steps):
        del labels["loss"]
    figure, axes = plotting.new_figure(f"Optimizer steps · {title}", rows=len(labels), size=(10, 2.6 * len(labels)))
    panels = dict(zip(labels, axes[:, 0], strict=True))
    for column, axis in panels.items():
        axis.set_ylabel(labels[column])
        if column == "loss":
            for (loss, label), colour in zip(_losses(steps).items(), (plotting.BLUE, plotting.GREY), strict=False):
                _draw_noisy(axis, steps["step"], steps[loss], f"{label}, ", colour)
        elif column == "grad_norm":
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


def _has_training_losses(table: pd.DataFrame) -> bool:
    """Whether a table has losses of training examples; for a training to publish it has none."""
    return bool(table["loss"].notna().any())


def _losses(table: pd.DataFrame) -> dict[str, str]:
    """Return column → label of the training's losses, the cross-entropy first; it may be the minimized loss."""
    if np.allclose(table["loss"], table["cross_entropy"], rtol=1e-5, equal_nan=True):
        return {"loss": "training"}
    return {"cross_entropy": "training (cross-entropy)", "loss": "training (minimized loss)"}


def _draw_noisy(axis: Axes, steps: pd.Series, values: pd.Series, name: str = "", colour: str = plotting.BLUE) -> None:
    """Plot noisy values faintly, and their running mean on top."""
    window = max(1, len(values) // 100)
    values = values.where(np.isfinite(values))
    axis.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    label = f"mean of {window} steps" if window > 1 else "each step"
    axis.plot(steps, values.rolling(window, min_periods=1).mean(), color=colour, label=name + label)
    axis.set_yscale("log")
    axis.legend(loc="best")


def _mark_skipped(axis: Axes, skipped: pd.DataFrame) -> None:
    """Mark the steps that changed nothing."""
    axis.set_yscale("log", base=2)
    if len(skipped):
        label = f"{len(skipped)} skipped, their gradients not being finite"
        axis.plot(skipped["step"], skipped["loss_scale"], "x", color=plotting.VERMILLION, label=label)
        axis.legend(loc="best")
