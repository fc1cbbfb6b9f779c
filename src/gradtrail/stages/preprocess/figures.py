"""Pictures of the data: what the images look like, and how the classes are shared out."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from gradtrail.core.common.split import Split
from gradtrail.stages.artifacts import plotting


def draw(folder: Path, splits: Mapping[str, Split], dataset: str, num_classes: int) -> None:
    """Draw all pictures of the `preprocess` stage into a folder."""
    plotting.save(draw_samples(splits["train"], dataset, num_classes), folder / "samples.png")
    plotting.save(draw_class_balance(splits, dataset, num_classes), folder / "class_balance.png")


def draw_samples(split: Split, dataset: str, num_classes: int, per_class: int = 12) -> Figure:
    """Draw the first training examples of each class, a row a class, by given label."""
    figure, axes = plotting.new_figure(
        f"Training examples by label ({dataset})",
        rows=num_classes,
        columns=per_class,
        size=(per_class * 0.8, num_classes * 0.8 + 0.5),
    )
    for label, row in enumerate(axes):
        chosen = np.flatnonzero(split.labels == label)[:per_class]
        for axis in row:
            axis.axis("off")
        for axis, example in zip(row, chosen, strict=False):
            plotting.show_image(axis, split.images[example])
    return figure


def draw_class_balance(splits: Mapping[str, Split], dataset: str, num_classes: int) -> Figure:
    """Draw each class's share of each split, so that splits of different size compare."""
    figure, axes = plotting.new_figure(f"Share of each class ({dataset})", size=(8, 3.6))
    axis, width = axes[0, 0], 0.8 / len(splits)
    for index, (name, split) in enumerate(splits.items()):
        shares = np.bincount(split.labels, minlength=num_classes) / len(split)
        places = np.arange(num_classes) + (index - (len(splits) - 1) / 2) * width
        axis.bar(places, 100 * shares, width, label=f"{name} ({len(split):,})", color=plotting.SPLIT_COLOURS[name])
    axis.set_xticks(np.arange(num_classes))
    axis.set_xlabel("class")
    axis.set_ylabel("% of the split")
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.2)  # room for the legend above the bars
    axis.legend(ncols=len(splits), loc="upper center")
    return figure
