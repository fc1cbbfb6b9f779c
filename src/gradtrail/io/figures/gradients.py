"""Pictures of per-example gradients: how their norms are spread, what they go with, and the largest of them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.examples import Split
from gradtrail.io.figures import style
from gradtrail.io.score_tables import select_largest


def draw(folder: Path, scores: pd.DataFrame, splits: Mapping[str, Split], title: str, num_largest: int) -> None:
    """Draw all pictures of the `gradients` stage into a folder."""
    draw_histograms(folder / "histograms.png", scores, title)
    draw_relations(folder / "relations.png", scores, title)
    draw_largest(folder / "largest.png", select_largest(scores, num_largest), splits, title)


def draw_histograms(path: Path, scores: pd.DataFrame, title: str) -> None:
    """Draw the spread of the gradient norm by split, and by whether the prediction is right."""
    figure, axes = style.new_figure(f"Per-example gradient norm · {title}", columns=2, size=(11, 4.2))
    edges = _log_bins(scores["grad_norm"])
    for split, part in scores.groupby("split", observed=True):
        colour = style.SPLIT_COLOURS[str(split)]
        axes[0, 0].hist(
            part["grad_norm"],
            edges,
            weights=np.full(len(part), 100 / len(part)),
            histtype="step",
            color=colour,
            label=str(split),
            linewidth=1.6,
        )
    for is_correct, name, colour in ((True, "right", style.BLUE), (False, "wrong", style.VERMILLION)):
        norms = scores.loc[scores["correct"] == is_correct, "grad_norm"]
        axes[0, 1].hist(norms, edges, histtype="stepfilled", alpha=0.6, color=colour, label=f"{name} ({len(norms):,})")
    axes[0, 0].set_ylabel("% of the split")
    axes[0, 1].set_ylabel("examples")
    for axis in axes.flat:
        axis.set(xscale="log", yscale="log", xlabel="‖∇ℓᵢ‖")
        axis.legend()
    style.save(figure, path)


def draw_relations(path: Path, scores: pd.DataFrame, title: str) -> None:
    """Draw the gradient norm over loss, margin and input norm."""
    figure, axes = style.new_figure(f"What large gradients go with · {title}", columns=3, size=(13, 4.2))
    for axis, column, label in zip(
        axes.flat, ("loss", "margin", "input_norm"), ("loss in nats", "margin in logits", "input norm"), strict=True
    ):
        for is_correct, name, colour in ((True, "right", style.BLUE), (False, "wrong", style.VERMILLION)):
            part = scores[scores["correct"] == is_correct]
            axis.plot(part[column], part["grad_norm"], ",", color=colour, alpha=0.5)
            axis.plot([], [], "o", color=colour, label=name)
        axis.set(yscale="log", xlabel=label, ylabel="‖∇ℓᵢ‖")
        axis.legend(loc="lower right")
    style.save(figure, path)


def draw_largest(path: Path, largest: pd.DataFrame, splits: Mapping[str, Split], title: str) -> None:
    """Draw the examples with the largest gradients, the largest first."""
    named = zip(largest["split"].astype(str), largest["example_id"].astype(int), strict=True)
    images = [_image(splits[split], example_id) for split, example_id in named]
    captions = [
        f"{row.split} #{row.example_id}\n{row.label} → {row.predicted}  ‖g‖ {row.grad_norm:.1f}"
        for row in largest.itertuples()
    ]
    style.gallery(np.stack(images), captions, f"Largest gradients: label → prediction · {title}", path, columns=8)


def _image(split: Split, example_id: int) -> np.ndarray:
    return split.images[np.flatnonzero(split.example_id == example_id)[0]]


def _log_bins(values: pd.Series, count: int = 80) -> np.ndarray:
    positive = values[values > 0]
    return np.geomspace(positive.min(), positive.max() * 1.0001, count) if len(positive) else np.linspace(0.1, 1, count)
