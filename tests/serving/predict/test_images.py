"""Images of digits come out in the form of the data set, whatever their background, size and position."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, seed
from PIL import Image
from untrusted import damaged, fuzz, refusal

from gradtrail.serving.predict.images import read_image
from gradtrail.stages.datasets import DATASETS, load_digits
from gradtrail.support.errors import UserError

FRAME = (28, 28)
MNIST, FASHION = (DATASETS[name].framing for name in ("mnist", "fashion_mnist"))


def seven(scale: int = 1, rows: int = 40, columns: int = 40, *, corner: tuple[int, int] = (8, 10)) -> np.ndarray:
    """Return a seven of strokes, white on black, 20 × 14 pixels, somewhere in an image; then all of it enlarged."""
    drawn = np.zeros((rows, columns), np.uint8)
    top, left = corner
    drawn[top : top + 3, left : left + 14] = 255
    for row in range(20):
        drawn[top + row, left + 11 - row // 2 : left + 14 - row // 2] = 255
    return np.kron(drawn, np.ones((scale, scale), np.uint8))


def save(path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(path)
    return path


def test_image_of_the_right_size_is_used_unchanged(tmp_path: Path) -> None:
    pixels = np.zeros(FRAME, np.uint8)
    pixels[4:24, 10:13] = np.arange(20, dtype=np.uint8)[:, None] * 10 + 60
    np.testing.assert_array_equal(read_image(save(tmp_path / "a.png", pixels), FRAME, MNIST), pixels)
    np.testing.assert_array_equal(read_image(save(tmp_path / "b.png", 255 - pixels), FRAME, MNIST), pixels)


def test_place_size_and_colour_make_no_difference(tmp_path: Path) -> None:
    expected = read_image(save(tmp_path / "a.png", seven()), FRAME, MNIST)
    assert expected.max() == 255
    assert np.count_nonzero(expected.any(axis=1)) == 20
    coloured = np.stack([255 - seven(), 255 - seven() // 2, np.full((40, 40), 255, np.uint8)], axis=-1)
    variants = [seven(corner=(1, 20)), seven(rows=90, columns=60), seven(scale=5), 255 - seven(), coloured]
    for number, pixels in enumerate(variants):
        result = read_image(save(tmp_path / f"{number}.png", pixels), FRAME, MNIST)
        np.testing.assert_allclose(result.astype(int), expected, atol=2)


def test_ink_is_centred(tmp_path: Path) -> None:
    result = read_image(save(tmp_path / "a.png", seven(3)), FRAME, MNIST).astype(float)
    for axis in (0, 1):
        centre = np.average(np.arange(28) + 0.5, weights=result.sum(axis=1 - axis))
        assert abs(centre - 14) <= 0.5


def test_clothes_fill_the_frame(tmp_path: Path) -> None:
    result = read_image(save(tmp_path / "a.png", seven(3)), FRAME, FASHION)
    rows, columns = (np.flatnonzero(result.any(axis=axis)) for axis in (1, 0))
    assert (rows[0], rows[-1]) == (0, 27)
    assert abs((columns[0] + columns[-1]) / 2 - 13.5) <= 0.5
    assert columns[-1] - columns[0] + 1 == round(28 * 14 / 20)


def test_digit_of_scikit_learn_is_processed_as_fetch_does(tmp_path: Path) -> None:
    images, *_ = load_digits()
    framing = DATASETS["digits"].framing
    for number, image in enumerate(images[:20]):
        digit = image[image.any(axis=1)][:, image.any(axis=0)]  # on a larger white page
        page = 255 - np.pad(np.kron(digit, np.ones((4, 4), np.uint8)), 30)
        result = read_image(save(tmp_path / f"{number}.png", page), FRAME, framing)
        rows, expected = np.flatnonzero(result.any(axis=1)), np.flatnonzero(image.any(axis=1))
        assert abs(len(rows) - len(expected)) <= 2, "they fill 20 rows"
        assert abs(rows.mean() - 13.5) <= 1


def test_image_of_an_unknown_data_set_is_neither_cropped_nor_inverted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (28, 28), dtype=np.uint8)
    pixels[0] = pixels[-1] = 240  # a bright background
    np.testing.assert_array_equal(read_image(save(tmp_path / "a.png", pixels), FRAME, None), pixels)
    blank = np.full((50, 30), 255, np.uint8)
    np.testing.assert_array_equal(read_image(save(tmp_path / "b.png", blank), FRAME, None), np.full(FRAME, 255))
    wide = np.full((20, 40), 100, np.uint8)
    wide[:, 20:] = 200
    result = read_image(save(tmp_path / "c.png", wide), FRAME, None)
    np.testing.assert_array_equal(result[7:21], np.repeat([[100, 200]], 14, axis=1).repeat(14, axis=0))


@pytest.mark.parametrize("name", ["a.gif", "a.ppm", "a.eps"])
def test_other_formats_are_refused_whatever_their_name(name: str, tmp_path: Path) -> None:
    Image.fromarray(seven()).convert("RGB").save(tmp_path / name)
    renamed = (tmp_path / name).rename(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a\.png: not a readable image: none of PNG, JPEG, BMP, TIFF, WEBP"):
        read_image(renamed, FRAME, MNIST)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp", "a.tif", "a.webp"])
def test_readable_formats_and_damage_to_them(name: str, tmp_path: Path) -> None:
    path, data = tmp_path / name, io.BytesIO()
    Image.fromarray(seven(8)).convert("RGB").save(data, {"jpg": "jpeg", "tif": "tiff"}.get(name[2:], name[2:]))
    path.write_bytes(data.getvalue())
    expected = read_image(save(tmp_path / "b.png", seven(8)), FRAME, MNIST)
    np.testing.assert_allclose(read_image(path, FRAME, MNIST).astype(int), expected, atol=12)

    @fuzz(40)
    @seed(0)
    @given(damaged(data.getvalue()))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        line = refusal(lambda: read_image(path, FRAME, MNIST))
        assert line is None or line.startswith(f"{path}: ")

    check()


def test_transparent_pixels_are_white(tmp_path: Path) -> None:
    black = np.zeros((40, 40, 4), np.uint8)
    black[..., 3] = seven()
    expected = read_image(save(tmp_path / "a.png", seven()), FRAME, MNIST)
    np.testing.assert_array_equal(read_image(save(tmp_path / "b.png", black), FRAME, MNIST), expected)


@pytest.mark.parametrize("background", [0, 255])
def test_blank_image_is_one_line(tmp_path: Path, background: int) -> None:
    with pytest.raises(UserError, match=r"a\.png: the image is blank"):
        read_image(save(tmp_path / "a.png", np.full((50, 30), background, np.uint8)), FRAME, MNIST)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"])
def test_file_without_an_image_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.png: not a readable image") as caught:
        read_image(tmp_path / "a.png", FRAME, MNIST)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"b\.png: no such file"):
        read_image(tmp_path / "b.png", FRAME, MNIST)


@pytest.mark.parametrize("side", [5_000, 10_000, 60_000])  # more than ours, than Pillow warns of, than Pillow reads
def test_huge_image_is_refused_by_its_header(side: int, tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", np.zeros((1, 1), np.uint8))
    header = bytearray(path.read_bytes())
    header[16:24] = side.to_bytes(4, "big") * 2
    path.write_bytes(header)
    with pytest.raises(UserError, match=re.escape("a.png: ")):
        read_image(path, FRAME, MNIST)
