"""Pictures of a training: by epoch, and step by step."""

from pathlib import Path

import pandas as pd

from gradtrail.core.history import History
from gradtrail.io.figures import style
from gradtrail.io.histories import epoch_table, step_table


def draw(folder: Path, history: History, title: str, clip_norm: float | None) -> None:
    """Draw all pictures of the `train` stage into a folder."""
    epochs, steps = epoch_table(history), step_table(history)
    draw_learning_curves(folder / "learning_curves.png", epochs, title)
    draw_steps(folder / "steps.png", steps, title, clip_norm)


def draw_learning_curves(path: Path, epochs: pd.DataFrame, title: str) -> None:
    """Draw loss and error of training and validation over the epochs."""
    figure, axes = style.new_figure(f"Learning curves · {title}", columns=2, size=(10, 4))
    for name, prefix in (("train", ""), ("validation", "validation_")):
        line = {"color": style.SPLIT_COLOURS[name], "label": name, "marker": "o"}
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
    style.save(figure, path)


def draw_steps(path: Path, steps: pd.DataFrame, title: str, clip_norm: float | None) -> None:
    """Draw loss, gradient norm (with the clipping threshold) and learning rate over the optimizer steps."""
    figure, axes = style.new_figure(f"Step by step · {title}", rows=3, size=(10, 8))
    smooth = max(1, len(steps) // 100)
    for axis, column, label in zip(
        axes.flat,
        ("loss", "grad_norm", "learning_rate"),
        ("loss in nats", "gradient norm", "learning rate"),
        strict=True,
    ):
        faint = column != "learning_rate"
        axis.plot(
            steps["step"], steps[column], color=style.BLUE, alpha=0.25 if faint else 1, linewidth=0.8 if faint else 1.6
        )
        if faint:
            mean = steps[column].rolling(smooth, min_periods=1).mean()
            axis.plot(steps["step"], mean, color=style.BLUE, label=f"mean of {smooth} steps")
        axis.set_ylabel(label)
    if clip_norm is not None:
        axes[1, 0].axhline(clip_norm, color=style.VERMILLION, linestyle="--", label=f"clipped to {clip_norm:g}")
    for axis in axes[:2, 0]:
        axis.set_yscale("log")
        axis.legend(loc="best")
    axes[2, 0].set_xlabel("optimizer step")
    style.save(figure, path)
