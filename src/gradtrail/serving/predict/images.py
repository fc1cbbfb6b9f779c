"""Converts image files into the form of a data set's images, for `gradtrail predict` and the server."""

import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, UnidentifiedImageError

from gradtrail.stages.datasets import DATASETS, Framing
from gradtrail.support.errors import UserError, one_line

_MAX_PIXELS = 2**24
_FAINT = 0.15  # share of the strongest ink; anything fainter is background
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP")  # Pillow reads dozens more, some of them by other programs
warnings.filterwarnings("ignore", module=r"PIL\.")  # catch_warnings for each image is not thread-safe


def framing_of(dataset: str) -> Framing | None:
    """Return how the images of a data set were made, by the name before its digest; None if it is not known."""
    source = DATASETS.get(dataset.partition(" ")[0])
    return source.framing if source else None


def read_image(path: Path, shape: tuple[int, int], framing: Framing | None) -> UInt8[np.ndarray, "height width"]:
    """Return an image file in the form of a data set's images, as `decode_image` does.

    Raises:
        UserError: The file is missing, is no image, is too large, or is blank; one line, with its path.
    """
    try:
        return decode_image(path, shape, framing)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def decode_image(
    source: Path | BinaryIO, shape: tuple[int, int], framing: Framing | None
) -> UInt8[np.ndarray, "height width"]:
    """Return an image in the form of the images of a data set.

    If it is known how these were made, an image of the frame's size is used unchanged, but inverted if its background
    is bright; any other image is processed like them. MNIST's were scaled to 20 of 28 pixels and shifted until the
    centre of mass of the ink was in the middle (Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten
    digits"); Fashion-MNIST's fill the frame (arXiv 1708.07747). If it is not known, nothing is inverted or cropped: an
    image of another size is scaled as a whole, with its proportions, and the rest of the frame gets the colour of its
    edge.

    Args:
        source: A PNG, JPEG, BMP, TIFF or WebP; transparent parts count as white.
        shape: Height and width of the frame, in pixels.
        framing: How the images of the data set were made; None if it is not known.

    Raises:
        UserError: The image is missing, not readable, too large, or blank; one line, without its path.
    """
    pixels = _grey(source)
    if pixels.shape == shape and (framing is None or _is_on_black(pixels)):
        return pixels
    grey = pixels.astype(np.float64) / 255
    if framing is None:
        return np.round(255 * _whole(grey, shape)).astype(np.uint8)
    ink = _ink(grey)
    if ink.max() < _FAINT / 2:
        raise UserError("the image is blank: nothing contrasts with its background")
    if ink.shape != shape:
        ink = _fitted(ink / ink.max(), shape, framing)
    return np.round(255 * np.clip(ink, 0, 1)).astype(np.uint8)


def _is_on_black(pixels: UInt8[np.ndarray, "height width"]) -> bool:
    """Return whether the edge is black and the image is visible: then `decode_image` returns it unchanged."""
    edge = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
    return sum(map(np.count_nonzero, edge)) < sum(map(len, edge)) // 2 and pixels.max() >= 255 * _FAINT / 2


def _grey(source: Path | BinaryIO) -> UInt8[np.ndarray, "rows columns"]:
    """Return the brightness of an image."""
    try:
        with Image.open(source, formats=_FORMATS) as image:
            if image.width * image.height > _MAX_PIXELS:
                size = f"{image.width:,} × {image.height:,} pixels"
                raise UserError(f"{size}, more than {_MAX_PIXELS:,} in all; scale it down first")
            image.load()
    except FileNotFoundError:
        raise UserError("no such file") from None
    except UnidentifiedImageError:
        raise UserError(f"not a readable image: none of {', '.join(_FORMATS)}") from None
    except UserError:
        raise
    except Exception as error:  # a damaged file: Pillow's readers raise any exception
        raise UserError(f"not a readable image: {one_line(error)[:200]}") from None
    if image.mode == "L" and "transparency" not in image.info:
        return np.asarray(image)
    whole = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.asarray(whole.convert("L"))


def _ink(grey: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, "rows columns"]:
    """Return the amount of ink, 0 for background; the background has the median brightness of the edge."""
    edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    ground = np.median(edge)
    return np.clip(ground - grey, 0, None) / ground if ground > 0.5 else np.clip(grey - ground, 0, None) / (1 - ground)


def _whole(grey: Float[np.ndarray, "rows columns"], shape: tuple[int, int]) -> Float[np.ndarray, "height width"]:
    """Return an image scaled into the middle of a frame; the rest has the median brightness of its edge."""
    small = _scaled(grey, min(side / length for side, length in zip(shape, grey.shape, strict=True)))
    frame = np.full(shape, np.median(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])))
    top, left = ((side - length) // 2 for side, length in zip(shape, small.shape, strict=True))
    frame[top : top + small.shape[0], left : left + small.shape[1]] = small
    return np.clip(frame, 0, 1)


def _scaled(grey: Float[np.ndarray, "rows columns"], scale: float) -> Float[np.ndarray, "height width"]:
    height, width = (max(1, round(length * scale)) for length in grey.shape)
    return np.asarray(Image.fromarray(grey.astype(np.float32)).resize((width, height), Image.Resampling.BOX))


def _fitted(
    ink: Float[np.ndarray, "rows columns"], shape: tuple[int, int], framing: Framing
) -> Float[np.ndarray, "height width"]:
    """Return the ink scaled to a frame and centred in it."""
    rows, columns = (np.flatnonzero((ink > _FAINT).any(axis=axis)) for axis in (1, 0))
    cut = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    small = _scaled(cut, framing.share * min(shape) / max(cut.shape))
    size, frame = small.shape, np.zeros(shape)
    weights = [small.sum(axis=1 - axis) if framing.by_mass else np.ones(size[axis]) for axis in (0, 1)]
    start = [_start(weights[axis], size[axis], shape[axis]) for axis in (0, 1)]
    frame[start[0] : start[0] + size[0], start[1] : start[1] + size[1]] = small
    return frame / frame.max()


def _start(ink: Float[np.ndarray, " pixels"], size: int, length: int) -> int:
    """Return the first pixel that puts the centre of mass in the middle, as far as the frame allows."""
    centre = np.average(np.arange(size) + 0.5, weights=ink)
    return int(np.clip(round(length / 2 - centre), 0, length - size))
