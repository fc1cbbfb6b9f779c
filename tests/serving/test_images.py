"""Images of digits come out in the form of the data set, whatever their background, size and position."""

import io
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import image_file
from fuzzing import damaged, fuzz, refusal
from hypothesis import given, seed
from PIL import Image

from gradtrail.serving.images import decode_image
from gradtrail.stages.datasets import load_digits
from gradtrail.stages.image_files import SOURCES, PicturesConfig, read_images
from gradtrail.support.errors import UserError

FRAME = (28, 28)
MNIST, FASHION, DIGITS, UNKNOWN = "mnist 1234abcd", "fashion_mnist", "digits", "idx 1234abcd"


def seven(scale: int = 1, rows: int = 40, columns: int = 40, *, corner: tuple[int, int] = (8, 10)) -> np.ndarray:
    """Return a seven of strokes, white on black, 20 × 14 pixels, somewhere in an image; then all of it enlarged."""
    drawn = np.zeros((rows, columns), np.uint8)
    top, left = corner
    drawn[top : top + 3, left : left + 14] = 255
    for row in range(20):
        drawn[top + row, left + 11 - row // 2 : left + 14 - row // 2] = 255
    return np.kron(drawn, np.ones((scale, scale), np.uint8))


def decoded(pixels: np.ndarray, *form: Any) -> np.ndarray:
    """Return the pixels of an image file in the form of a data set's images."""
    return decode_image(io.BytesIO(image_file(pixels)), *form)


def test_image_of_the_right_size_is_used_unchanged_or_inverted() -> None:
    pixels = np.zeros(FRAME, np.uint8)
    pixels[4:24, 10:13] = np.arange(20, dtype=np.uint8)[:, None] * 10 + 60
    for image in (pixels, 255 - pixels):
        np.testing.assert_array_equal(decoded(image, FRAME, MNIST), pixels)


def test_place_size_color_and_transparency_make_no_difference() -> None:
    expected = decoded(seven(), FRAME, MNIST)
    assert expected.max() == 255
    assert np.count_nonzero(expected.any(axis=1)) == 20
    for axis in (0, 1):
        centre = np.average(np.arange(28) + 0.5, weights=expected.sum(axis=1 - axis, dtype=float))
        assert abs(centre - 14) <= 0.5, "centred by mass"
    colored = np.stack([255 - seven(), 255 - seven() // 2, np.full((40, 40), 255, np.uint8)], axis=-1)
    black = np.zeros((40, 40, 4), np.uint8)
    black[..., 3] = seven()  # transparent pixels are white
    variants = [seven(corner=(1, 20)), seven(rows=90, columns=60), seven(scale=5), 255 - seven(), colored, black]
    for pixels in variants:
        result = decoded(pixels, FRAME, MNIST)
        np.testing.assert_allclose(result.astype(int), expected, atol=2)


def test_clothes_fill_the_frame() -> None:
    result = decoded(seven(3), FRAME, FASHION)
    rows, columns = (np.flatnonzero(result.any(axis=axis)) for axis in (1, 0))
    assert (rows[0], rows[-1]) == (0, 27)
    assert abs((columns[0] + columns[-1]) / 2 - 13.5) <= 0.5
    assert columns[-1] - columns[0] + 1 == round(28 * 14 / 20)


def test_digit_of_scikit_learn_is_processed_as_fetch_does() -> None:
    images, *_ = load_digits()
    for image in images[:20]:
        digit = image[image.any(axis=1)][:, image.any(axis=0)]  # on a larger white page
        page = 255 - np.pad(np.kron(digit, np.ones((4, 4), np.uint8)), 30)
        result = decoded(page, FRAME, DIGITS)
        rows, expected = np.flatnonzero(result.any(axis=1)), np.flatnonzero(image.any(axis=1))
        assert abs(len(rows) - len(expected)) <= 2, "they fill 20 rows"
        assert abs(rows.mean() - 13.5) <= 1


def test_image_of_an_unknown_data_set_is_neither_cropped_nor_inverted() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, FRAME, dtype=np.uint8)
    pixels[0] = pixels[-1] = 240  # a bright background
    np.testing.assert_array_equal(decoded(pixels, FRAME, UNKNOWN), pixels)
    blank = np.full((50, 30), 255, np.uint8)
    np.testing.assert_array_equal(decoded(blank, FRAME, UNKNOWN), np.full(FRAME, 255))
    wide = np.full((20, 40), 100, np.uint8)
    wide[:, 20:] = 200
    result = decoded(wide, FRAME, UNKNOWN)
    np.testing.assert_array_equal(result[7:21], np.repeat([[100, 200]], 14, axis=1).repeat(14, axis=0))


def random_image(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("dataset", [UNKNOWN, "cifar10 1234abcd", "folder 1234abcd", MNIST])
@pytest.mark.parametrize("size", [(20, 12), (40, 60), (33, 7), (5, 8)])
def test_channels_of_a_color_image_are_scaled_like_grey_images(size: tuple[int, int], dataset: str) -> None:
    pixels = random_image(*size, 3)
    result = decoded(pixels, (20, 12, 3), dataset)
    like = UNKNOWN if dataset == MNIST else dataset  # nothing is inverted or centered in color
    channels = [decoded(pixels[..., channel], (20, 12), like) for channel in range(3)]
    np.testing.assert_array_equal(result, np.stack(channels, axis=-1))
    if size == (20, 12):
        np.testing.assert_array_equal(result, pixels)


@pytest.mark.parametrize("dataset", [UNKNOWN, "folder"])
def test_grey_image_has_equal_channels_in_color_and_a_color_image_its_luminance_in_grey(dataset: str) -> None:
    grey, color = random_image(30, 50), random_image(30, 50, 3)
    result = decoded(grey, (20, 12, 3), dataset)
    expected = decoded(grey, (20, 12), dataset)
    np.testing.assert_array_equal(result, np.repeat(expected[..., None], 3, axis=-1))
    luminance = np.round(color @ [0.299, 0.587, 0.114]).astype(np.uint8)
    result = decoded(color, (20, 12), dataset)
    expected = decoded(luminance, (20, 12), dataset)
    np.testing.assert_allclose(result.astype(int), expected, atol=1)


@pytest.mark.parametrize("dataset", SOURCES)
def test_images_of_image_files_are_cropped_and_resized_as_by_fetch(dataset: str, tmp_path: Path) -> None:
    names = {"wide": (40, 60, 3), "high": (31, 20, 3), "small": (9, 10, 3)}
    for name, shape in names.items():
        Image.fromarray(random_image(*shape)).save(tmp_path / f"{name}.png")
    files = [(tmp_path / f"{name}.png", name) for name in names]
    for color in (True, False):
        pictures = PicturesConfig(size=(20, 24), color=color, test_fraction=0.5, seed=0)
        (images, *_), _ = read_images({"train": files, "test": files}, pictures)
        for (path, _), expected in zip(files, images, strict=True):
            np.testing.assert_array_equal(decode_image(path, images.shape[1:], f"{dataset} 1234abcd"), expected)

    pixels = random_image(40, 60, 3)
    result = decoded(pixels, (20, 20, 3), dataset)
    middle = np.asarray(Image.fromarray(pixels[:, 10:50]).resize((20, 20), Image.Resampling.LANCZOS))
    inside = slice(3, -3)  # the filter sees what is left of the middle and right of it
    np.testing.assert_array_equal(result[:, inside], middle[:, inside])


def test_transparent_parts_of_a_color_image_are_white_and_its_frame_has_the_color_of_its_edge() -> None:
    pixels = np.full((10, 20, 4), (200, 100, 50, 255), np.uint8)
    pixels[4:6, 8:12, 3] = 0
    result = decoded(pixels, (20, 20, 3), UNKNOWN)
    expected = np.full((20, 20, 3), (200, 100, 50))
    expected[9:11, 8:12] = 255
    np.testing.assert_array_equal(result, expected)


def test_model_of_other_channels_takes_no_image_files() -> None:
    with pytest.raises(UserError, match="takes images of 4 channels, image files have 1 or 3; send arrays"):
        decoded(seven(), (20, 12, 4), UNKNOWN)


@pytest.mark.parametrize("kind", ["png", "jpeg", "bmp", "tiff", "webp"])
def test_readable_formats_and_damage_to_them(kind: str) -> None:
    file = image_file(seven(8)) if kind == "png" else image_file(np.stack([seven(8)] * 3, axis=-1), kind)
    expected = decoded(seven(8), FRAME, MNIST)
    result = decode_image(io.BytesIO(file), FRAME, MNIST)
    np.testing.assert_allclose(result.astype(int), expected, atol=12)

    @fuzz(40)
    @seed(0)
    @given(damaged(file))
    def check(content: bytes) -> None:
        line = refusal(lambda: decode_image(io.BytesIO(content), FRAME, MNIST))
        assert line is None or "\n" not in line

    check()


def huge(side: int) -> bytes:
    """Return a PNG of one pixel whose header announces more."""
    header = bytearray(image_file(np.zeros((1, 1), np.uint8)))
    header[16:24] = side.to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    return bytes(header)


NONE = "not a readable image: none of PNG, JPEG, BMP, TIFF, WEBP"
UNUSABLE = {
    "empty": (b"", NONE),
    "cut": (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "not a readable image"),
    "gif": (image_file(seven(), "gif"), NONE),
    "ppm": (image_file(seven(), "ppm"), NONE),
    "eps": (image_file(seven(), "eps"), NONE),
    "black": (image_file(np.zeros((50, 30), np.uint8)), "the image is blank"),
    "white": (image_file(np.full(FRAME, 255, np.uint8)), "the image is blank"),
    "more pixels than ours": (huge(5_000), "5,000 × 5,000 pixels, more than 16,777,216"),
    "more than Pillow warns of": (huge(10_000), "not a readable image: Image size (100000000 pixels) exceeds"),
    "more than Pillow reads": (huge(60_000), "not a readable image"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_or_missing_image_is_one_line(name: str, tmp_path: Path) -> None:
    content, message = UNUSABLE[name]
    (tmp_path / "a.png").write_bytes(content)  # its name makes no difference
    with pytest.raises(UserError, match=f"^{re.escape(message)}") as caught:
        decode_image(tmp_path / "a.png", FRAME, MNIST)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no such file"):
        decode_image(tmp_path / "b.png", FRAME, MNIST)
