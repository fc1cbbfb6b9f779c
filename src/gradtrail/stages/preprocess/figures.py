"""A figure of sample images, and a warning about classes with too few training examples."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradtrail.core.data import Split
from gradtrail.stages.common import plotting

_PER_CLASS = 12  # images of each class
_SHOWN = 10  # classes of a warning


def draw_samples(path: Path, train: Split, dataset: str, num_classes: int, names: Sequence[str] = ()) -> None:
    """Draw the first training examples of each class, a row a class, by given label; of the first 20 classes."""
    rows = min(num_classes, plotting.MAX_CLASSES)
    note = "" if rows == num_classes else f", the first {rows} of {num_classes}"
    height, width, *channels = train.images.shape[1:]
    size = (_PER_CLASS * 0.8, rows * 0.8 + 0.5)
    figure, axes = plotting.new_figure(f"Training examples by label{note} ({dataset})", size=size)
    # On one pair of axes: one for each takes seconds
    mosaic = np.full((rows, height, _PER_CLASS, width, *channels), plotting.paper(train.images), np.uint8)
    for label, row in enumerate(mosaic):
        chosen = train.images[train.labels == label][:_PER_CLASS]
        row[:, : len(chosen)] = chosen.swapaxes(0, 1)
    plotting.show_image(axes[0, 0], mosaic.reshape(rows * height, _PER_CLASS * width, *channels))
    for label, name in enumerate(names[:rows]):
        middle = (label + 0.5) * height
        axes[0, 0].text(-width / 8, middle, plotting.short(name).replace("$", r"\$"), ha="right", va="center")
    plotting.save(figure, path)


def warn_of_small_classes(labels: np.ndarray, classes: Sequence[str]) -> None:
    """Print one line on stderr if a class has fewer than two training examples."""
    counts = np.bincount(labels, minlength=len(classes))
    small = [f"{classes[int(label)]} ({counts[label]})" for label in np.flatnonzero(counts < 2)]
    if small:
        listed = ", ".join(small[:_SHOWN]) + (f" and {len(small) - _SHOWN} more" if len(small) > _SHOWN else "")
        print(
            f"preprocess: classes with fewer than two training examples: {listed}; `gradients` leaves them out of "
            "coherence_within_classes, and classes.csv has no coherence of such a class with itself",
            file=sys.stderr,
        )
