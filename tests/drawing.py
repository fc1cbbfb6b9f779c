"""What tests of figures have in common: what a figure shows, read back from its axes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D


def lines(axis: Axes) -> dict[str, Line2D]:
    """The lines of a plot that have a label, by label."""
    return {str(line.get_label()): line for line in axis.lines if not str(line.get_label()).startswith("_")}


def points(line: Line2D) -> np.ndarray:
    """What a line goes through, shape (points, 2)."""
    return np.column_stack([np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)])


def heights(axis: Axes) -> dict[str, list[float]]:
    """The heights of the bars of a plot, by the label of their series."""
    return {str(group.get_label()): [bar.get_height() for bar in group] for group in axis.containers}


def lengths(axis: Axes) -> dict[str, list[float]]:
    """The same of horizontal bars."""
    return {str(group.get_label()): [bar.get_width() for bar in group] for group in axis.containers}


def names(axis: Axes) -> tuple[str, str, str]:
    """The title of a plot and the labels of its axes."""
    return axis.get_title(), axis.get_xlabel(), axis.get_ylabel()


def cells(figure: Figure, shape: tuple[int, int]) -> list[tuple[str, np.ndarray]]:
    """The captions of a gallery, each with the image of that shape that lies below it."""
    (axis,) = figure.axes
    mosaic = np.asarray(axis.images[0].get_array())
    height, width = shape
    found = []
    for text in axis.texts:
        middle, above = text.get_position()
        left, top = round(middle - width / 2), round(above + 1)
        found.append((text.get_text(), mosaic[top : top + height, left : left + width]))
    return found


def assert_same_png_twice(draw: Callable[[Path], None], folder: Path) -> None:
    for name in ("left", "right"):
        draw(folder / f"{name}.png")
    assert (folder / "left.png").read_bytes() == (folder / "right.png").read_bytes()
