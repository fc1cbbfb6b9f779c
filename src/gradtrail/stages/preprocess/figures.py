"""A figure of sample images, and a warning about classes with too few training examples."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradtrail.core.data import Split, are_unequal, class_sizes
from gradtrail.stages.common import plotting

_PER_CLASS = 12  # images of each class
_SHOWN = 10  # classes of a warning
_ADVISED = 3  # times the examples of the smallest class


def draw_samples(path: Path, train: Split, dataset: str, num_classes: int, names: Sequence[str] = ()) -> None:
    """Draw the first training examples of each class, a row a class, by given label; of the first 20 classes."""
    rows = min(num_classes, plotting.MAX_CLASSES)
    note = "" if rows == num_classes else f", the first {rows} of {num_classes}"
    height, width, *channels = train.images.shape[1:]
    size = (_PER_CLASS * 0.8 + bool(names) * 1.4, rows * 0.8 + 0.5)
    figure, axes = plotting.new_figure(f"Training examples by label{note} ({dataset})", size=size)
    # On one pair of axes: one for each takes seconds
    mosaic = np.full((rows, height, _PER_CLASS, width, *channels), plotting.paper(train.images), np.uint8)
    for label, row in enumerate(mosaic):
        chosen = train.images[train.labels == label][:_PER_CLASS]
        row[:, : len(chosen)] = chosen.swapaxes(0, 1)
    plotting.show_image(axes[0, 0], mosaic.reshape(rows * height, _PER_CLASS * width, *channels))
    counts = np.bincount(train.labels, minlength=num_classes)
    if names:
        figure.set_layout_engine("compressed")  # otherwise names are cut off
    for label, name in enumerate(names[:rows]):
        place, caption = (-width / 8, (label + 0.5) * height), f"{plotting.short(name)}\n{counts[label]:,}"
        axes[0, 0].text(*place, caption.replace("$", r"\$"), ha="right", va="center")
    plotting.save(figure, path)


def report_classes(labels: np.ndarray, classes: Sequence[str]) -> None:
    """Print a line on stderr if classes are unequal, and one if some have fewer than two training examples."""
    counts, sizes, lines = np.bincount(labels, minlength=len(classes)).tolist(), class_sizes(labels), []
    if are_unequal(labels):
        smallest, largest = (f"{size:,} ({classes[counts.index(size)]})" for size in sizes)
        advice = "; train.cross_entropy.class_weights: balanced gives each the same part of the loss"
        advice = advice if sizes[1] > _ADVISED * sizes[0] else ""
        lines.append(f"classes are unequal: {smallest} to {largest} training examples{advice}")
    if small := [f"{name} ({count})" for name, count in zip(classes, counts, strict=True) if count < 2]:
        listed = ", ".join(small[:_SHOWN]) + (f" and {len(small) - _SHOWN} more" if len(small) > _SHOWN else "")
        where = (
            "`gradients` leaves them out of coherence_within_classes, and classes.csv has no coherence of such a class"
        )
        lines.append(f"classes with fewer than two training examples: {listed}; {where} with itself")
    for line in lines:
        print(f"preprocess: {line}", file=sys.stderr)
