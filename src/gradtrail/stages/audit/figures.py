"""Figures of an audit: the most suspicious labels of each split, and the calibration of their probabilities."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gradtrail.core.data import Split
from gradtrail.core.evaluate import Bins
from gradtrail.stages.artifacts import plotting


def draw(
    folder: Path,
    suspects: pd.DataFrame,
    splits: Mapping[str, Split],
    calibration: Mapping[str, Bins],
    title: str,
    num_suspects: int,
) -> None:
    """Write `suspects_<split>.png` and `calibration.png`."""
    for name, split in splits.items():
        differs = suspects["proposed_label"] != suspects["label"]
        part = suspects[(suspects["split"] == name) & differs].head(num_suspects)
        plotting.save(
            draw_suspects(
                part,
                split,
                f"Suspected label errors: given → proposed, chance that the given one is wrong · {name} · {title}",
            ),
            folder / f"suspects_{name}.png",
        )
    plotting.save(draw_calibration(calibration, title), folder / "calibration.png")


def draw_suspects(suspects: pd.DataFrame, split: Split, title: str) -> Figure:
    """Draw suspected label errors with given → proposed label and the probability that the given one is wrong."""
    row_of = {int(example_id): row for row, example_id in enumerate(split.example_id)}
    rows = np.array([row_of[int(example_id)] for example_id in suspects["example_id"]], np.int64)
    captions = [
        f"{label} → {proposed}\n{wrong:.0%}"
        for label, proposed, wrong in suspects[["label", "proposed_label", "probability_wrong"]].itertuples(index=False)
    ]
    return plotting.gallery(split.images[rows], captions, title)


def draw_calibration(calibration: Mapping[str, Bins], title: str) -> Figure:
    """Draw the share of planted labels against the probability of being wrong, for each kind of noise."""
    figure, axes = plotting.new_figure(f"Planted labels found wrong · {title}", size=(6, 4.8))
    axes[0, 0].plot([0, 1], [0, 1], color=plotting.GREY, linewidth=1, label="as probable as stated")
    for (kind, curve), colour in zip(calibration.items(), plotting.CYCLE, strict=False):
        is_filled = curve.count > 0
        sizes = 4 + 10 * np.log10(curve.count[is_filled])
        places = curve.confidence[is_filled], curve.accuracy[is_filled]
        label = f"{kind}: calibration error {curve.expected_calibration_error:.4f}"
        axes[0, 0].plot(*places, color=colour, linewidth=1)
        axes[0, 0].scatter(*places, s=sizes, color=colour, label=label)
    axes[0, 0].set(xlabel="probability that the label is wrong", ylabel="share that was planted", xlim=(-0.02, 1.02))
    axes[0, 0].legend(loc="upper left")
    return figure
