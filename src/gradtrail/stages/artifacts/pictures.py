"""Reads image files, which are not trusted, into arrays of pixels: for `fetch`, `gradtrail predict` and the server."""

import warnings
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from gradtrail.support.errors import UserError, one_line

Pixels: TypeAlias = UInt8[np.ndarray, "height width *channels"]

_MAX_PIXELS = 2**24
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP")  # Pillow reads dozens more, some of them by other programs
warnings.filterwarnings("ignore", module=r"PIL\.")  # catch_warnings for each image is not thread-safe


def read_pixels(source: Path | BinaryIO, *, color: bool) -> Pixels:
    """Return the pixels of an image file: RGB, or brightness without an axis of channels.

    The image is turned as its EXIF orientation says. Transparent parts are white.

    Raises:
        UserError: one line, without the file's name: the file is missing, not readable, or too large.
    """
    try:
        with Image.open(source, formats=_FORMATS) as image:
            if image.width * image.height > _MAX_PIXELS:
                size = f"{image.width:,} × {image.height:,} pixels"
                raise UserError(f"{size}, more than {_MAX_PIXELS:,} in all; scale it down first")
            image.load()
            return _converted(ImageOps.exif_transpose(image), color=color)
    except FileNotFoundError:
        raise UserError("no such file") from None
    except UnidentifiedImageError:
        raise UserError(f"not a readable image: none of {', '.join(_FORMATS)}") from None
    except UserError:
        raise
    except Exception as error:  # a damaged file: Pillow's readers raise any exception
        raise UserError(f"not a readable image: {one_line(error)[:200]}") from None


def cropped(pixels: Pixels, shape: tuple[int, int]) -> Pixels:
    """Return the largest part in the middle of an image that has the proportions of the shape, resized to it."""
    height, width = shape
    return np.asarray(ImageOps.fit(Image.fromarray(pixels), (width, height), Image.Resampling.LANCZOS))


def _converted(image: Image.Image, *, color: bool) -> np.ndarray:
    if image.mode.startswith("I;16"):  # Pillow would cut values above 255 off
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "transparency" in image.info or image.mode not in ("L", "RGB"):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.asarray(image.convert("RGB" if color else "L"))
