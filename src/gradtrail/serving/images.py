"""Converts image files into the form of a data set's images, for `gradtrail predict` and the server."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps

from gradtrail.stages.common.params import IMAGE_FILES
from gradtrail.stages.data.pictures import Pixels, cropped, read_picture
from gradtrail.stages.datasets import DATASETS, Framing
from gradtrail.support.errors import UserError

_FAINT = 0.15  # share of the strongest ink; anything fainter is background


def decode_image(source: Path | BinaryIO, shape: tuple[int, ...], dataset: str) -> Pixels:
    """Return an image file in the form of a data set's images; the name of the data set may have its digest behind it.

    A model of color images, (height, width, 3), gets the RGB values, a model of grey images the luminance; transparent
    parts count as white. What follows depends on how the data set's images were made:

    - Image files, by `fetch`: the image is cropped to the proportions of the frame and resized.
    - Bright ink on black: an image of the frame's size is used unchanged, but inverted if its background is bright;
      any other image is processed like the data set's. MNIST's were scaled to 20 of 28 pixels and shifted until the
      center of mass of the ink was in the middle (Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten
      digits"); Fashion-MNIST's fill the frame (arXiv 1708.07747).
    - Unknown: an image of another size is scaled as a whole, with its proportions, and the rest of the frame gets the
      color of its edge.

    Raises UserError, one line, if the image is missing, not readable, too large, or blank.
    """
    height, width, *channels = shape
    if channels not in ([], [3]):
        raise UserError(f"the model takes images of {channels[0]} channels, image files have 1 or 3; send arrays")
    pixels = read_picture(source, color=bool(channels)).pixels

    name = dataset.partition(" ")[0]
    if name in IMAGE_FILES:
        return cropped(pixels, (height, width))
    framing = DATASETS[name].framing if name in DATASETS and not channels else None
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    if framing is None:
        background = tuple(map(int, np.atleast_1d(np.median(edge, axis=0))))
        return np.asarray(ImageOps.pad(Image.fromarray(pixels), (width, height), Image.Resampling.BOX, background))
    return _framed(pixels, edge, (height, width), framing)


def _framed(
    pixels: UInt8[np.ndarray, "rows columns"],
    edge: UInt8[np.ndarray, " pixels"],
    shape: tuple[int, int],
    framing: Framing,
) -> UInt8[np.ndarray, "height width"]:
    """Return the image with bright ink on black, processed like the data set's unless it has the frame's size."""
    is_on_black = np.count_nonzero(edge) < len(edge) // 2 and pixels.max() >= 255 * _FAINT / 2
    if pixels.shape == shape and is_on_black:
        return pixels

    # Ink is what differs from the background: darker on a bright one, brighter on a dark one.
    grey, background = pixels / 255, np.median(edge / 255)
    is_bright = background > 0.5
    ink = (background - grey) / background if is_bright else (grey - background) / (1 - background)
    if ink.max() < _FAINT / 2:
        raise UserError("the image is blank: nothing contrasts with its background")
    if ink.shape != shape:
        ink = _fitted(ink.clip(0) / ink.max(), shape, framing)
    return np.round(255 * ink.clip(0, 1)).astype(np.uint8)


def _fitted(
    ink: Float[np.ndarray, "rows columns"], shape: tuple[int, int], framing: Framing
) -> Float[np.ndarray, "height width"]:
    """Return the ink cut out, scaled to the share of a frame that it has in the data set, and centered."""
    rows, columns = (np.flatnonzero((ink > _FAINT).any(axis=axis)) for axis in (1, 0))
    cut = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    height, width = (max(1, round(side * framing.share * min(shape) / max(cut.shape))) for side in cut.shape)
    image = Image.fromarray(cut.astype(np.float32))
    small = np.asarray(image.resize((width, height), Image.Resampling.BOX))
    frame, start = np.zeros(shape), list[int]()
    for axis, (size, length) in enumerate(zip(small.shape, shape, strict=True)):
        weights = small.sum(axis=1 - axis) if framing.by_mass else None
        centre = np.average(np.arange(size) + 0.5, weights=weights)
        start.append(int(np.clip(round(length / 2 - centre), 0, length - size)))
    top, left = start
    frame[top : top + small.shape[0], left : left + small.shape[1]] = small
    return frame / frame.max()
