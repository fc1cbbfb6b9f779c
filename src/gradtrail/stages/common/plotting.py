"""One look for all figures: size, type, and the colours of Okabe and Ito, which colour-blind people tell apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gradtrail.core.data import Split

BLUE, ORANGE, GREEN, VERMILLION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#6B6B6B"
NARROW_INCHES = 8
_CELL_INCHES = (1.15, 1.55)  # size of an image in a gallery, with its caption
_SHORT_NAME = 14  # characters of the name of a class in a figure
CYCLE = (BLUE, VERMILLION, GREEN, ORANGE)
MAX_CLASSES = 20  # that a figure shows one by one: more take minutes to draw, and nobody can read them
SPLIT_COLOURS = {"train": BLUE, "validation": ORANGE, "test": GREEN}

_STYLE: Any = {
    "backend": "agg",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def new_figure(title: str, *, rows: int = 1, columns: int = 1, size: tuple[float, float]) -> tuple[Figure, np.ndarray]:
    """Return a figure with a title and its axes, an array of shape (rows, columns); `size` in inches.

    In a narrow figure the title breaks at its ` · `. No `matplotlibrc` and no variable changes how it looks.
    """
    mpl.rcdefaults()
    mpl.rcParams.update(_STYLE)
    figure = Figure(figsize=size)
    axes = figure.subplots(rows, columns, squeeze=False)
    if size[0] < NARROW_INCHES:
        title = title.replace(" · ", "\n")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG; equal figures give equal bytes.

    A logarithmic axis over two decades or more has no minor ticks, which would take half of the drawing time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = axis.get_view_interval()
        if axis.get_scale() == "log" and high >= 100 * low:
            axis.set_minor_locator(NullLocator())
    canvas: Any = FigureCanvasAgg(figure)  # without types
    canvas.print_png(path)  # `savefig` would draw a second time, only for the layout


def gallery(images: np.ndarray, captions: Sequence[str], title: str, *, columns: int = 10) -> Figure:
    """Draw images, uint8, in rows with a caption of one to five lines each; see `show_image` for their shapes.

    All are drawn as one image on one pair of axes: a pair for each takes ten times as long. The title breaks at its
    ` · `.
    """
    rows = max(1, -(-len(images) // columns))
    height, width, *channels = images.shape[1:]
    tall = _CELL_INCHES[1] + 0.14 * max([0, *(caption.count("\n") - 3 for caption in captions)])  # for a fifth line
    across, down = round(1.2 * width), round(1.2 * width * tall / _CELL_INCHES[0])
    top = down - height  # of an image, below its caption
    mosaic = np.full((rows * down, columns * across, *channels), paper(images), np.uint8)
    size = (_CELL_INCHES[0] * columns, tall * rows + 0.8)
    figure, axes = new_figure(title.replace(" · ", "\n"), size=size)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(index, columns)
        left = column * across + (across - width) // 2
        mosaic[row * down + top : (row + 1) * down, left : left + width] = image
        place = left + width / 2, row * down + top - 1
        axes[0, 0].text(*place, caption.replace("$", r"\$"), fontsize=8, ha="center", va="bottom").set_in_layout(False)
    show_image(axes[0, 0], mosaic)
    return figure


def name_example(split: Split, row: int) -> str:
    """Return the id of an example, such as `#50`, and in a second line the name of its file if it has one."""
    names = [] if split.files is None else [short(str(split.files[row]).rpartition("/")[2])]
    return "\n".join([f"#{split.example_id[row]}", *names])


def name_classes(axis: Axes, classes: Sequence[str], *, sides: str = "xy") -> None:
    """Write the names of the classes on the x or y axis: all, or of many every second, third and so on."""
    ticks = range(0, len(classes), -(-len(classes) // MAX_CLASSES))
    names = [short(classes[tick]).replace("$", r"\$") for tick in ticks]
    if "x" in sides:
        axis.set_xticks(ticks, names)
        if not _fit_one_line(names):
            for text in axis.get_xticklabels():
                text.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")
    if "y" in sides:
        axis.set_yticks(ticks, names)


def arrow(label: str, predicted: str, rest: str = "") -> str:
    """Return the caption `label → prediction` and what follows, in several lines if the names are long."""
    label, predicted = short(label), short(predicted)
    if _fit_one_line([label, predicted]):
        return f"{label} → {predicted}{rest}"
    return f"{label} →\n{predicted}\n{rest.strip()}".strip()


def _fit_one_line(names: Sequence[str]) -> bool:
    return max(map(len, names)) <= 3


def short(name: str) -> str:
    """Return the name of a class or file, without its middle if it is too long for a figure."""
    return name if len(name) <= _SHORT_NAME else f"{name[:8]}…{name[-5:]}"


def paper(images: np.ndarray) -> int:
    """Return the value of a pixel that `show_image` draws white next to these images."""
    return 0 if images.ndim == 3 else 255


def show_image(axis: Axes, image: np.ndarray) -> None:
    """Draw one image: in color as it is, (height, width, 3), and grayscale as dark ink on white, (height, width)."""
    axis.axis("off")
    axis.imshow(image, cmap="gray_r", vmin=0, vmax=255)
