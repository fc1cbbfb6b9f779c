"""Pixels are those of the file, whatever its depth; a range that is not known is refused."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from gradtrail.stages.data.pictures import read_picture
from gradtrail.support.errors import UserError

SHADES = np.linspace(0, 1, 48).reshape(8, 6)
DEEP = np.round(SHADES * 65535).astype(np.uint16)
SHALLOW = (DEEP >> 8).astype(np.uint8)


def tiff(array: np.ndarray, kind: int = 1, *, order: str = "<", black: int = 1) -> bytes:
    """Encode a grayscale TIFF; `kind` of its samples: 1 unsigned, 2 signed, 3 floating point."""
    data, bits = array.astype(array.dtype.newbyteorder(order)).tobytes(), 8 * array.itemsize  # type: ignore[arg-type]
    rows, columns = array.shape
    tags = {256: columns, 257: rows, 258: bits, 259: 1, 262: black, 273: 8, 277: 1, 278: rows, 279: len(data)}
    tags |= {339: kind}
    entries = [struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items()]
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(data))
    return head + data + struct.pack(f"{order}H", len(tags)) + b"".join(entries) + bytes(4)


def saved(array: np.ndarray, kind: str) -> bytes:
    Image.fromarray(array).save(file := io.BytesIO(), kind)
    return file.getvalue()


FILES: dict[str, tuple[bytes, np.ndarray | str]] = {
    "16-bit TIFF": (tiff(DEEP), SHALLOW),
    "big-endian 16-bit TIFF": (tiff(DEEP, order=">"), SHALLOW),
    "16-bit TIFF whose 0 is white": (tiff(DEEP, black=0), 255 - SHALLOW),
    "16-bit PNG": (saved(DEEP, "png"), SHALLOW),
    "black 16-bit PNG": (saved(DEEP * 0, "png"), SHALLOW * 0),
    "12 bits in a 16-bit TIFF": (
        tiff(DEEP >> 4),
        "16-bit values of at most 4,095, nearly black; scale them to 0 to 65,535",
    ),
    "8 bits in a 16-bit PNG": (saved(DEEP >> 8, "png"), "16-bit values of at most 255, nearly black"),
    "32-bit float TIFF": (tiff(SHADES.astype(np.float32), 3), "32-bit or signed values, whose range is not known"),
    "32-bit integer TIFF": (tiff(DEEP.astype(np.uint32)), "32-bit or signed values, whose range is not known"),
    "signed 16-bit TIFF": (tiff(DEEP.view(np.int16), 2), "32-bit or signed values, whose range is not known"),
    "signed 8-bit TIFF": (tiff(SHALLOW.view(np.int8), 2), "32-bit or signed values, whose range is not known"),
}


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_depth_of_a_file_is_read_or_refused(name: str, *, color: bool) -> None:
    data, expected = FILES[name]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=f"^{expected}"):
            read_picture(io.BytesIO(data), color=color)
        return
    pixels, has_more_pages = read_picture(io.BytesIO(data), color=color)
    np.testing.assert_array_equal(pixels, np.repeat(expected[..., None], 3, axis=-1) if color else expected)
    assert not has_more_pages
