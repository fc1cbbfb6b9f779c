"""Images of digits come out in the form of the data set, whatever their background, size and position."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradtrail.experiments.predict import read_image
from gradtrail.support.errors import UserError

FRAME = (28, 28)


def seven(scale: int = 1, rows: int = 40, columns: int = 40, *, at: tuple[int, int] = (8, 10)) -> np.ndarray:
    """Return a seven of strokes, white on black, 20 × 14 pixels, somewhere in an image; then all of it enlarged."""
    drawn = np.zeros((rows, columns), np.uint8)
    top, left = at
    drawn[top : top + 3, left : left + 14] = 255
    for row in range(20):
        drawn[top + row, left + 11 - row // 2 : left + 14 - row // 2] = 255
    return np.kron(drawn, np.ones((scale, scale), np.uint8))


def save(path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(path)
    return path


def test_one_of_the_right_size_is_taken_as_it_is(tmp_path: Path) -> None:
    pixels = np.zeros(FRAME, np.uint8)
    pixels[4:24, 10:13] = np.arange(20, dtype=np.uint8)[:, None] * 10 + 60
    np.testing.assert_array_equal(read_image(save(tmp_path / "a.png", pixels), FRAME), pixels)
    np.testing.assert_array_equal(read_image(save(tmp_path / "b.png", 255 - pixels), FRAME), pixels)


def test_place_size_and_colour_make_no_difference(tmp_path: Path) -> None:
    expected = read_image(save(tmp_path / "a.png", seven()), FRAME)
    assert expected.max() == 255
    assert np.count_nonzero(expected.any(axis=1)) == 20
    coloured = np.stack([255 - seven(), 255 - seven() // 2, np.full((40, 40), 255, np.uint8)], axis=-1)
    others = [seven(at=(1, 20)), seven(rows=90, columns=60), seven(scale=5), 255 - seven(), coloured]
    for number, pixels in enumerate(others):
        found = read_image(save(tmp_path / f"{number}.png", pixels), FRAME)
        np.testing.assert_allclose(found.astype(int), expected, atol=2)


def test_the_ink_lies_in_the_middle(tmp_path: Path) -> None:
    found = read_image(save(tmp_path / "a.png", seven(3)), FRAME).astype(float)
    for axis in (0, 1):
        centre = np.average(np.arange(28) + 0.5, weights=found.sum(axis=1 - axis))
        assert abs(centre - 14) <= 0.5


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    black = np.zeros((40, 40, 4), np.uint8)
    black[..., 3] = seven()
    expected = read_image(save(tmp_path / "a.png", seven()), FRAME)
    np.testing.assert_array_equal(read_image(save(tmp_path / "b.png", black), FRAME), expected)


@pytest.mark.parametrize("background", [0, 128, 255])
def test_a_blank_one_is_one_line(tmp_path: Path, background: int) -> None:
    with pytest.raises(UserError, match=r"a\.png: the image is blank"):
        read_image(save(tmp_path / "a.png", np.full((50, 30), background, np.uint8)), FRAME)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"])
def test_what_is_not_an_image_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.png: not a readable image") as caught:
        read_image(tmp_path / "a.png", FRAME)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"b\.png: no such file"):
        read_image(tmp_path / "b.png", FRAME)


def test_a_huge_one_is_refused_by_its_header(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", np.zeros((1, 1), np.uint8))
    header = bytearray(path.read_bytes())
    header[16:24] = (60_000).to_bytes(4, "big") * 2
    path.write_bytes(header)
    with pytest.raises(UserError, match=re.escape("a.png: ")):
        read_image(path, FRAME)
