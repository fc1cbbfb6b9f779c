"""Figures of the data: what the images look like."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from gradtrail.core.common.split import Split
from gradtrail.stages.artifacts import plotting


def draw(folder: Path, splits: Mapping[str, Split], dataset: str, num_classes: int) -> None:
    """Draw all figures of the `preprocess` stage into a folder."""
    plotting.save(draw_samples(splits["train"], dataset, num_classes), folder / "samples.png")


def draw_samples(split: Split, dataset: str, num_classes: int, per_class: int = 12) -> Figure:
    """Draw the first training examples of each class, a row a class, by given label; of the first 20 classes."""
    rows = min(num_classes, plotting.MAX_CLASSES)
    shown = "" if rows == num_classes else f", the first {rows} of {num_classes}"
    figure, axes = plotting.new_figure(
        f"Training examples by label{shown} ({dataset})",
        rows=rows,
        columns=per_class,
        size=(per_class * 0.8, rows * 0.8 + 0.5),
    )
    for label, row in enumerate(axes):
        chosen = np.flatnonzero(split.labels == label)[:per_class]
        for axis in row:
            axis.axis("off")
        for axis, example in zip(row, chosen, strict=False):
            plotting.show_image(axis, split.images[example])
    return figure
