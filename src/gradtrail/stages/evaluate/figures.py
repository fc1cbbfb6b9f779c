"""Figures of an evaluation: the confusion matrix, the reliability diagram, and the worst mistakes."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from gradtrail.core.common.split import Split
from gradtrail.core.evaluate.metrics import Evaluation, Reliability
from gradtrail.stages.artifacts import plotting


def draw(folder: Path, result: Evaluation, split: Split, title: str, num_mistakes: int) -> None:
    """Draw all figures of the `evaluate` stage into a folder."""
    plotting.save(draw_confusion(result.confusion, title), folder / "confusion.png")
    plotting.save(draw_reliability(result.reliability, title), folder / "reliability.png")
    plotting.save(draw_mistakes(result, split, title, num_mistakes), folder / "mistakes.png")


def draw_confusion(confusion: np.ndarray, title: str) -> Figure:
    """Draw a confusion matrix; colours show the mistakes alone, so that the diagonal has none."""
    figure, axes = plotting.new_figure(f"Confusion matrix · {title}", size=(6.6, 6.2))
    axis = axes[0, 0]
    mistakes = np.where(np.eye(len(confusion), dtype=bool), 0, confusion)
    axis.imshow(mistakes, cmap="Oranges")
    for (row, column), count in np.ndenumerate(confusion):
        shade = plotting.GREY if row == column else "white" if count > mistakes.max() / 2 else "black"
        axis.text(column, row, f"{count}" if count else "·", ha="center", va="center", color=shade, fontsize=8)
    axis.set(xlabel="predicted", ylabel="label", xticks=range(len(confusion)), yticks=range(len(confusion)))
    axis.grid(visible=False)
    return figure


def draw_reliability(bins: Reliability, title: str) -> Figure:
    """Draw accuracy over confidence, and below it the number of examples in each bin."""
    figure, axes = plotting.new_figure(f"Calibration · {title}", rows=2, size=(6, 6))
    width = 1 / len(bins.count)
    centres = (np.arange(len(bins.count)) + 0.5) * width
    axes[0, 0].plot([0, 1], [0, 1], color=plotting.GREY, linestyle="--", label="perfect")
    axes[0, 0].plot(bins.confidence, bins.accuracy, color=plotting.BLUE, marker="o", label="model")
    axes[0, 0].set_ylabel("accuracy")
    axes[0, 0].legend(title=f"expected calibration error {bins.expected_calibration_error:.4f}", loc="upper left")
    axes[1, 0].bar(centres, bins.count, width * 0.9, color=plotting.BLUE)
    axes[1, 0].set_yscale("log")
    axes[1, 0].set(xlabel="confidence (highest probability)", ylabel="examples", xlim=axes[0, 0].get_xlim())
    return figure


def draw_mistakes(result: Evaluation, split: Split, title: str, count: int) -> Figure:
    """Draw the worst mistakes, the most certain first, with label, prediction and its probability."""
    worst = result.mistakes[:count]
    captions = [
        f"#{split.example_id[i]}\n{split.labels[i]} → {result.predicted[i]} ({result.probability[i]:.0%})"
        for i in worst
    ]
    return plotting.gallery(split.images[worst], captions, f"Worst mistakes: label → prediction · {title}")
