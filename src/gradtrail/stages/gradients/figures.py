"""Figures of per-example gradients: distribution, largest ones, suspected label errors, and classes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gradtrail.core.data import Split
from gradtrail.core.gradients.analysis import GradientAnalysis, epoch_column
from gradtrail.core.gradients.scores import rank_correlation
from gradtrail.stages.common import plotting
from gradtrail.stages.gradients.outputs import SUSPICION, Results, Tables

_CORRECTNESS = ((True, "correct", plotting.BLUE), (False, "misclassified", plotting.VERMILLION))


def draw(folder: Path, results: Results, splits: Mapping[str, Split], title: str, batch_size: int) -> None:
    """Draw all figures of the `gradients` stage into a folder; `batch_size` is that of the training.

    Without training examples, figures about them are left out.
    """
    tables, analysis = results.tables, results.analysis
    plotting.save(draw_histograms(tables.scores, title), folder / "histograms.png")
    plotting.save(draw_relations(tables.scores, title), folder / "relations.png")
    plotting.save(draw_largest(tables.largest, splits, title), folder / "largest.png")
    for name, ranked in tables.suspects.groupby("split", observed=True):
        plotting.save(draw_suspects(ranked, splits, title), folder / f"suspects_{name}.png")
    if tables.has_training_rows:
        plotting.save(draw_course(tables, analysis, title, batch_size), folder / "course.png")
        plotting.save(draw_classes(analysis, tables.classes["class"].tolist(), title), folder / "classes.png")
    if len(tables.label_error_scores):
        plotting.save(draw_detection(tables.label_error_scores, title), folder / "label_error_scores.png")


def draw_histograms(scores: pd.DataFrame, title: str) -> Figure:
    """Draw the distribution of the gradient norm by split, and by whether the prediction is correct."""
    figure, axes = plotting.new_figure(f"Per-example gradient norm · {title}", columns=2, size=(11, 4.2))
    positive = scores.loc[scores["grad_norm"] > 0, "grad_norm"]
    edges = np.geomspace(positive.min(), positive.max() * 1.0001, 80) if len(positive) else np.linspace(0.1, 1, 80)
    for split, part in scores.groupby("split", observed=True):
        colour = plotting.SPLIT_COLOURS[str(split)]
        axes[0, 0].hist(
            part["grad_norm"],
            edges,
            weights=np.full(len(part), 100 / len(part)),
            histtype="step",
            color=colour,
            label=str(split),
            linewidth=1.6,
        )
    for is_correct, name, colour in _CORRECTNESS:
        norms = scores.loc[scores["correct"] == is_correct, "grad_norm"]
        axes[0, 1].hist(norms, edges, histtype="stepfilled", alpha=0.6, color=colour, label=f"{name} ({len(norms):,})")
    axes[0, 0].set_ylabel("% of the split")
    axes[0, 1].set_ylabel("examples")
    for axis in axes.flat:
        axis.set(xscale="log", yscale="log", xlabel="‖∇ℓᵢ‖")
        axis.legend()
    return figure


def draw_relations(scores: pd.DataFrame, title: str) -> Figure:
    """Draw the gradient norm over loss, margin and input norm."""
    figure, axes = plotting.new_figure(f"Gradient norm and other scores · {title}", columns=3, size=(13, 4.2))
    for axis, column, label in zip(
        axes.flat, ("loss", "margin", "input_norm"), ("loss in nats", "margin in logits", "input norm"), strict=True
    ):
        for is_correct, name, colour in _CORRECTNESS:
            part = scores[scores["correct"] == is_correct]
            axis.plot(part[column], part["grad_norm"], ",", color=colour, alpha=0.5)
            axis.plot([], [], "o", color=colour, label=name)
        axis.set(yscale="log", xlabel=label, ylabel="‖∇ℓᵢ‖")
        axis.legend(loc="lower right")
    return figure


def draw_largest(largest: pd.DataFrame, splits: Mapping[str, Split], title: str) -> Figure:
    """Draw the examples with the largest gradients, the largest first."""
    heading = f"Largest gradients: label → prediction · {title}"
    return _gallery(largest, splits, heading, lambda row: f"  ‖g‖ {row.grad_norm:.1f}")


def draw_course(tables: Tables, analysis: GradientAnalysis, title: str, batch_size: int) -> Figure:
    """Draw the noise scale at the kept epochs, if it is finite, rank correlations of the norm, and the sharpness."""
    figure, axes = plotting.new_figure(f"Gradients over training · {title}", columns=3, size=(15, 4.2))
    noise = tables.noise_scale
    finite = noise[np.isfinite(noise["noise_scale"])]
    top = 3 * max(finite["noise_scale"].max() if len(finite) else 1, batch_size)
    lines = [finite["noise_scale"] - finite["low"], finite["high"].clip(upper=top) - finite["noise_scale"]]
    axes[0, 0].errorbar(
        finite["epoch"], finite["noise_scale"], yerr=np.maximum(lines, 0), fmt="o-", color=plotting.BLUE, capsize=4
    )
    axes[0, 0].axhline(batch_size, color=plotting.GREY, linestyle="--", label=f"batch size {batch_size}")
    axes[0, 0].set(yscale="log", xlabel="epoch", ylabel="noise scale tr(Σ) / ‖G‖², in examples")
    axes[0, 0].legend()
    train, epochs = {name: column.to_numpy() for name, column in tables.train.items()}, list(analysis.noise_scales)
    columns = {
        "input norm": "input_norm",
        f"‖∇ℓᵢ‖ at epoch {epochs[-1]}": epoch_column("grad_norm", epochs[-1]),
        "suspicion": SUSPICION,
    }
    for (label, other), colour in zip(columns.items(), plotting.CYCLE, strict=False):
        correlations = [rank_correlation(train[epoch_column("grad_norm", epoch)], train[other]) for epoch in epochs]
        axes[0, 1].plot(epochs, correlations, "o-", color=colour, label=label)
    axes[0, 1].set(xlabel="epoch", ylabel="rank correlation with ‖∇ℓᵢ‖ at that epoch", ylim=(-1.05, 1.05))
    axes[0, 1].legend()
    axes[0, 2].plot(noise["epoch"], noise["sharpness"], "o-", color=plotting.BLUE)
    axes[0, 2].set(xlabel="epoch", ylabel="sharpness: largest eigenvalue of the Hessian", ylim=(0, None))
    axes[0, 0].set_xlim(axes[0, 1].get_xlim())  # so that an epoch without a noise scale is visibly missing
    return figure


def draw_classes(analysis: GradientAnalysis, names: Sequence[str], title: str) -> Figure:
    """Draw the cosines of the classes' mean gradients, their coherence, and shares of a step's decrease in loss."""
    classes = analysis.classes
    figure, axes = plotting.new_figure(f"Gradients by class · {title}", columns=3, size=(14, 4.6))
    panels = {"cosine of the mean gradients": classes.cosine, "coherence of per-example gradients": classes.coherence}
    for axis, (name, matrix) in zip(axes[0], panels.items(), strict=False):
        limit = float(np.nanmax(np.abs(matrix))) or 1.0
        drawn = axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.grid(visible=False)
        axis.set(title=name, xlabel="class", ylabel="class")
        plotting.name_classes(axis, names)
        figure.colorbar(drawn, ax=axis, shrink=0.8)
    axes[0, 2].bar(range(len(classes.share)), 100 * classes.share, color=plotting.BLUE)
    axes[0, 2].axhline(0, color=plotting.GREY, linewidth=1)
    axes[0, 2].set(title="share of a gradient step's decrease in loss", xlabel="class", ylabel="%")
    plotting.name_classes(axes[0, 2], names, sides="x")
    return figure


def draw_suspects(suspects: pd.DataFrame, splits: Mapping[str, Split], title: str) -> Figure:
    """Draw the suspected label errors of a split, the most suspect first; a true label follows if it is known."""

    def caption(row: Any) -> str:
        truth = "" if row.label == row.true_label else f" (true {plotting.short(row.true_label)})"
        return f"{truth}  {row.probability:.0%}"

    heading = f"Suspected label errors: label → prediction, probability of the label · {title}"
    return _gallery(suspects, splits, heading, caption)


def draw_detection(detection: pd.DataFrame, title: str) -> Figure:
    """Draw how well each score finds the labels that label noise changed."""
    figure, axes = plotting.new_figure(
        f"Detection of label errors by each score · {title}", size=(9, 0.24 * len(detection) + 1.4)
    )
    names = [f"{row.score} {row.epoch and f'({row.epoch})'}" for row in _rows(detection)]
    places = np.arange(len(names))[::-1]
    axes[0, 0].plot(detection["average_precision"], places, "o", color=plotting.BLUE, label="average precision")
    axes[0, 0].plot(detection["auroc"], places, "|", color=plotting.VERMILLION, label="AUROC", markersize=9)
    axes[0, 0].set(yticks=places, xlim=(0, 1.01))
    axes[0, 0].set_yticklabels(names, fontsize=8)
    axes[0, 0].legend(loc="lower left")
    return figure


def _gallery(table: pd.DataFrame, splits: Mapping[str, Split], title: str, caption: Callable[[Any], str]) -> Figure:
    """Draw an image for each row of a table; `caption` is the end of the row's caption."""
    images, captions = [], []
    for row in _rows(table):
        split = splits[row.split]
        images.append(split.images[split.example_id == row.example_id][0])
        captions.append(f"{row.split} #{row.example_id}\n{plotting.arrow(row.label, row.predicted, caption(row))}")
    return plotting.gallery(np.stack(images), captions, title, columns=8)


def _rows(table: pd.DataFrame) -> list[Any]:
    return list(table.itertuples())
