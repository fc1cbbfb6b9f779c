"""`gradtrail predict`: what the weights say of pictures of digits, and what they saw."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from rich.console import Console
from rich.style import Style
from rich.text import Text

from gradtrail.core import prediction
from gradtrail.core.compilation import Compiler
from gradtrail.io.figures import style
from gradtrail.io.files import atomic_file
from gradtrail.io.pictures import read_digit
from gradtrail.io.terminal import stdout_console
from gradtrail.io.weights import read_weights

_NUM_SHOWN = 3  # classes


def predict(paths: Sequence[Path], weights: Path, picture: Path | None) -> None:
    """Print the label of each picture with its probability, on a terminal below what the network saw.

    Args:
        paths: of the pictures.
        weights: a weights file.
        picture: where to draw all of them, as a PNG; None for nowhere.

    Raises:
        UserError: a picture or the weights cannot be used; one line.
    """
    model, params, about = read_weights(weights)
    images = np.stack([read_digit(path, model.config.image_shape) for path in paths])
    call = prediction.compile_predict(model, len(images), compiler=Compiler(time.perf_counter))
    probabilities = np.asarray(call(params, images, np.zeros(len(images), np.int32))["probabilities"])
    console = stdout_console()
    for path, image, row in zip(paths, images, probabilities, strict=True):
        if console.is_terminal:
            _show(image, console)
        console.print(f"{path}: {_said(row)}", markup=False, soft_wrap=True)
    if picture:
        title = f"{model.config.name}, {weights.stem} weights (epoch {about.epoch}) on {about.dataset.label}"
        _draw(paths, images, probabilities, title, picture)


def _said(probabilities: Float[np.ndarray, " classes"]) -> str:
    """Say the likeliest class, and the next."""
    first, *others = np.argsort(probabilities)[::-1][:_NUM_SHOWN]
    rest = ", ".join(f"{label} {probabilities[label]:.1%}" for label in others)
    return f"{first}  {probabilities[first]:.1%}  (then {rest})"


def _show(image: UInt8[np.ndarray, "height width"], console: Console) -> None:
    """Print an image, two pixels in a character."""
    rows = np.concatenate([image, np.zeros((image.shape[0] % 2, image.shape[1]), np.uint8)])
    for upper, lower in zip(rows[::2], rows[1::2], strict=True):
        line = Text()
        for top, bottom in zip(upper, lower, strict=True):
            line.append("▀", Style(color=f"rgb({top},{top},{top})", bgcolor=f"rgb({bottom},{bottom},{bottom})"))
        console.print(line)


def _draw(
    paths: Sequence[Path],
    images: UInt8[np.ndarray, "pictures height width"],
    probabilities: Float[np.ndarray, "pictures classes"],
    title: str,
    to: Path,
) -> None:
    """Draw each image as the network saw it beside the probabilities of all classes."""
    size = (style.NARROW_INCHES, 1 + 2 * len(images))
    figure, axes = style.new_figure(title, rows=len(images), columns=2, size=size)
    for (seen, bars), path, image, row in zip(axes, paths, images, probabilities, strict=True):
        seen.imshow(image, cmap="gray", vmin=0, vmax=255)
        seen.set(title=path.name, xticks=[], yticks=[])
        seen.grid(visible=False)
        colours = [style.VERMILLION if label == row.argmax() else style.GREY for label in range(len(row))]
        bars.bar(range(len(row)), row, color=colours)
        bars.set(title=f"{row.argmax()}: {row.max():.1%}", xticks=range(len(row)), ylim=(0, 1), ylabel="probability")
    with atomic_file(to) as beside:
        style.save(figure, beside)
