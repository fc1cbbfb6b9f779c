"""Pictures of digits from anywhere, made to look like those that a network was trained on.

`gradtrail predict`: what the weights say of pictures of digits, and what they saw.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, UnidentifiedImageError
from rich.console import Console
from rich.style import Style
from rich.text import Text

from gradtrail.core.nn import inference
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.artifacts.weights import read_weights
from gradtrail.stages.common.files import atomic_file
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.progress import stdout_console

_MAX_PIXELS = 2**24
_FAINT = 0.15  # of the strongest ink: what is fainter is paper
_BOX = 20 / 28  # of the frame, that MNIST's digits fill


def read_digit(path: Path, shape: tuple[int, int]) -> UInt8[np.ndarray, "height width"]:
    """Return a picture as MNIST has its digits: bright ink on black, fitted into the frame.

    A picture of the frame's very size is taken as it is, but for bright paper, which is turned dark. Any other is
    treated as MNIST's were (Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits"): scaled, its
    proportions kept, to 20 of 28 pixels, and shifted until the centre of mass of the ink lies in the middle.

    Args:
        path: a PNG or anything else that Pillow reads; where it is transparent, it is taken for white.
        shape: height and width of the frame, in pixels.

    Raises:
        UserError: it is missing, no picture, too large, or blank; one line.
    """
    ink = _ink(_grey(path))
    if ink.max() < _FAINT / 2:
        raise UserError(f"{path}: nothing is on it: a digit that stands out from its ground is needed")
    if ink.shape != shape:
        ink = _fitted(ink / ink.max(), shape)
    return np.round(255 * np.clip(ink, 0, 1)).astype(np.uint8)


def _grey(path: Path) -> Float[np.ndarray, "rows columns"]:
    """Return the brightness of a picture, from 0 to 1."""
    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > _MAX_PIXELS:
                size = f"{picture.width:,} × {picture.height:,} pixels"
                raise UserError(f"{path}: {size}, more than {_MAX_PIXELS:,} in all; scale it down first")
            whole = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{path}: no picture that can be read: {one_line(error)[:200]}") from None
    return np.asarray(whole.convert("L"), np.float64) / 255


def _ink(grey: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, "rows columns"]:
    """Return how much ink is where, on ground that is 0: the edge of a picture is ground, be it bright or dark."""
    edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    ground = np.median(edge)
    return np.clip(ground - grey, 0, None) / ground if ground > 0.5 else np.clip(grey - ground, 0, None) / (1 - ground)


def _fitted(ink: Float[np.ndarray, "rows columns"], shape: tuple[int, int]) -> Float[np.ndarray, "height width"]:
    """Return the ink scaled into the middle of a frame."""
    rows, columns = (np.flatnonzero((ink > _FAINT).any(axis=axis)) for axis in (1, 0))
    cut = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = _BOX * min(shape) / max(cut.shape)
    size = [max(1, round(length * scale)) for length in cut.shape]
    small = Image.fromarray(cut.astype(np.float32)).resize((size[1], size[0]), Image.Resampling.BOX)
    frame = np.zeros(shape)
    where = [_start(np.asarray(small).sum(axis=1 - axis), size[axis], shape[axis]) for axis in (0, 1)]
    frame[where[0] : where[0] + size[0], where[1] : where[1] + size[1]] = np.asarray(small)
    return frame / frame.max()


def _start(ink: Float[np.ndarray, " pixels"], size: int, length: int) -> int:
    """Return where to begin so that the centre of mass lies in the middle, as far as the frame allows it."""
    centre = np.average(np.arange(size) + 0.5, weights=ink)
    return int(np.clip(round(length / 2 - centre), 0, length - size))


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
    call = inference.compile_predict(model, len(images), compiler=Compiler(time.perf_counter))
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
    size = (plotting.NARROW_INCHES, 1 + 2 * len(images))
    figure, axes = plotting.new_figure(title, rows=len(images), columns=2, size=size)
    for (seen, bars), path, image, row in zip(axes, paths, images, probabilities, strict=True):
        seen.imshow(image, cmap="gray", vmin=0, vmax=255)
        seen.set(title=path.name, xticks=[], yticks=[])
        seen.grid(visible=False)
        colours = [plotting.VERMILLION if label == row.argmax() else plotting.GREY for label in range(len(row))]
        bars.bar(range(len(row)), row, color=colours)
        bars.set(title=f"{row.argmax()}: {row.max():.1%}", xticks=range(len(row)), ylim=(0, 1), ylabel="probability")
    with atomic_file(to) as beside:
        plotting.save(figure, beside)
