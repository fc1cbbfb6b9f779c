"""Figures of an evaluation: the confusion matrix, the reliability diagram, and the worst mistakes."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from gradtrail.core.common.split import Split
from gradtrail.core.evaluate.metrics import Evaluation
from gradtrail.stages.artifacts import plotting


def draw(folder: Path, result: Evaluation, split: Split, title: str, num_mistakes: int) -> None:
    """Draw all figures of the `evaluate` stage into a folder."""
    plotting.save(draw_confusion(result.confusion, title), folder / "confusion.png")
    plotting.save(draw_reliability(result, title), folder / "reliability.png")
    plotting.save(draw_mistakes(result, split, title, num_mistakes), folder / "mistakes.png")


def draw_confusion(confusion: np.ndarray, title: str) -> Figure:
    """Draw a confusion matrix; colours show the mistakes alone, so that the diagonal has none."""
    figure, axes = plotting.new_figure(f"Confusion matrix · {title}", size=(6.6, 6.2))
    axis = axes[0, 0]
    mistakes = np.where(np.eye(len(confusion), dtype=bool), 0, confusion)
    axis.imshow(mistakes, cmap="Oranges")
    for (row, column), count in np.ndenumerate(confusion) if len(confusion) <= plotting.MAX_CLASSES else ():
        shade = plotting.GREY if row == column else "white" if count > mistakes.max() / 2 else "black"
        axis.text(column, row, f"{count}" if count else "·", ha="center", va="center", color=shade, fontsize=8)
    ticks = plotting.class_ticks(len(confusion))
    axis.set(xlabel="predicted", ylabel="label", xticks=ticks, yticks=ticks)
    axis.grid(visible=False)
    return figure


def draw_reliability(result: Evaluation, title: str) -> Figure:
    """Draw accuracy over confidence, calibrated and not, and below it the number of examples in each bin."""
    figure, axes = plotting.new_figure(f"Calibration · {title}", rows=2, size=(6, 6))
    above, below = axes[:, 0]
    above.plot([0, 1], [0, 1], color=plotting.GREY, linestyle="--", label="perfect")
    kinds = (
        (f"calibrated (temperature {result.temperature:.3g})", result.reliability, plotting.BLUE),
        ("uncalibrated", result.reliability_uncalibrated, plotting.VERMILLION),
    )
    width = 0.9 / len(result.reliability.count)
    for place, (name, bins, colour) in enumerate(kinds):
        error = f"calibration error {bins.expected_calibration_error:.4f}"
        above.plot(bins.confidence, bins.accuracy, color=colour, marker="o", label=f"{name}: {error}")
        left = np.arange(len(bins.count)) / len(bins.count) + place * width / 2
        below.bar(left, bins.count, width / 2, color=colour, align="edge")
    above.set_ylabel("accuracy")
    above.legend(loc="upper left")
    below.set_yscale("log")
    below.set(xlabel="confidence (highest probability)", ylabel="examples", xlim=above.get_xlim())
    return figure


def draw_mistakes(result: Evaluation, split: Split, title: str, count: int) -> Figure:
    """Draw the worst mistakes, the most certain first, with label, prediction and its probability."""
    worst = result.mistakes[:count]
    captions = [
        f"#{split.example_id[i]}\n{split.labels[i]} → {result.predicted[i]} ({result.probability[i]:.0%})"
        for i in worst
    ]
    return plotting.gallery(split.images[worst], captions, f"Worst mistakes: label → prediction · {title}")
