"""Reads image files, which are not trusted, into arrays of pixels: for `fetch`, `gradtrail predict` and the server."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from gradtrail.stages.common.files import LFS_POINTER, is_lfs_pointer
from gradtrail.support.errors import UserError, one_line

Pixels: TypeAlias = UInt8[np.ndarray, "height width *channels"]

_MAX_PIXELS = 2**24
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP")  # Pillow reads dozens more, some of them by other programs
_SIGNED, _WHITE_IS_ZERO = 2, 0  # values of a TIFF file's tags
warnings.filterwarnings("ignore", module=r"PIL\.")  # catch_warnings for each image is not thread-safe


class Picture(NamedTuple):
    """A picture as it is in a file."""

    pixels: Pixels
    has_more_pages: bool  # True if the file has further pages or frames, which are not read


def read_picture(source: Path | BinaryIO, *, color: bool) -> Picture:
    """Read the first page of an image file as RGB, or as brightness without an axis of channels.

    The image is turned as its EXIF orientation says. Transparent parts are white.

    Raises:
        UserError: one line, without the file's name: the file is missing, not readable, or too large, or the range of
            its values is not known.
    """
    try:
        if isinstance(source, Path) and source.exists() and not source.is_file():
            raise UserError("not a file but a folder, pipe or device")  # reading a pipe may never end
        with Image.open(source, formats=_FORMATS) as image:
            if image.width * image.height > _MAX_PIXELS:
                size = f"{image.width:,} × {image.height:,} pixels"
                raise UserError(f"{size}, more than {_MAX_PIXELS:,} in all; scale it down first")
            image.load()
            upright, tags = ImageOps.exif_transpose(image), getattr(image, "tag_v2", {})
            if image.mode in ("I", "F") or _SIGNED in tags.get(ExifTags.Base.SampleFormat, ()):
                raise UserError("32-bit or signed values, whose range is not known; save it with 8 or 16 bits")
            if image.mode.startswith("I;16"):  # Pillow would cut values above 255 off
                upright = _in_8_bits(upright, tags)
            # the further images of a JPEG file are previews or depths
            has_more_pages = getattr(image, "is_animated", False) and image.format != "MPO"
            return Picture(_converted(upright, color=color), has_more_pages)
    except FileNotFoundError:
        raise UserError("no such file") from None
    except UnidentifiedImageError:
        fault = LFS_POINTER if is_lfs_pointer(source) else f"not a readable image: none of {', '.join(_FORMATS)}"
        raise UserError(fault) from None
    except UserError:
        raise
    except Exception as error:  # a damaged file: Pillow's readers raise any exception
        raise UserError(f"not a readable image: {one_line(error)[:200]}") from None


def cropped(pixels: Pixels, shape: tuple[int, int]) -> Pixels:
    """Return the largest part in the middle of an image that has the proportions of the shape, resized to it."""
    height, width = shape
    return np.asarray(ImageOps.fit(Image.fromarray(pixels), (width, height), Image.Resampling.LANCZOS))


def _in_8_bits(image: Image.Image, tags: Mapping[int, Any]) -> Image.Image:
    """Return a 16-bit grayscale image with 8 bits; `tags` are those of a TIFF file."""
    (bits,), values = tags.get(ExifTags.Base.BitsPerSample, (16,)), np.asarray(image).astype(np.int32)
    white, largest = 2**bits - 1, int(values.max())
    if 0 < largest <= white // 16:
        remedy = f"scale them to 0 to {white:,}, or save it with 8 bits"
        raise UserError(f"{bits}-bit values of at most {largest:,}, nearly black; {remedy}")
    if tags.get(ExifTags.Base.PhotometricInterpretation) == _WHITE_IS_ZERO:
        values = white - values
    return Image.fromarray((values >> (bits - 8)).astype(np.uint8))


def _converted(image: Image.Image, *, color: bool) -> np.ndarray:
    if "transparency" in image.info or image.mode not in ("L", "RGB"):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.asarray(image.convert("RGB" if color else "L"))
