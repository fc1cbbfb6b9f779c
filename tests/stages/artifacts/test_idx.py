"""IDX files: what the writer writes is read, everything else is refused in one line, and so are changed raw data."""

import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from untrusted import refusal

from gradtrail.stages.artifacts.idx import RAW_FILES, describe_raw, encode_idx, measure_raw, read_idx, read_raw
from gradtrail.support.errors import UserError

Array = npt.NDArray[np.uint8]
SHAPES = st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)))
ARRAYS = hnp.arrays(np.uint8, SHAPES)


def parse(data: bytes, shape: tuple[int | None, ...]) -> Array:
    """Return the array in a file with these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "some-file").write_bytes(data)
        return read_idx(Path(folder) / "some-file", shape=shape)


def refused(data: bytes, shape: tuple[int | None, ...]) -> str:
    """Return the message with which `data` are refused."""
    line = refusal(lambda: parse(data, shape))
    assert line is not None
    assert "/some-file: " in line
    return line


@given(ARRAYS)
def test_round_trip(array: Array) -> None:
    decoded = parse(encode_idx(array), array.shape)
    assert decoded.dtype == np.uint8
    assert decoded.flags.writeable
    np.testing.assert_array_equal(decoded, array)


def test_known_bytes() -> None:
    data = bytes.fromhex("00000803 00000002 00000001 00000003 010203 0405ff")
    array = np.array([[[1, 2, 3]], [[4, 5, 255]]], dtype=np.uint8)
    assert encode_idx(array) == data
    np.testing.assert_array_equal(parse(data, (None, 1, 3)), array)


@given(ARRAYS, st.data())
def test_any_truncation_is_refused(array: Array, draw: st.DataObject) -> None:
    data = encode_idx(array)
    refused(data[: draw.draw(st.integers(0, len(data) - 1))], (None,) * array.ndim)


@given(ARRAYS, st.binary(min_size=1, max_size=50))
def test_any_trailing_bytes_are_refused(array: Array, surplus: bytes) -> None:
    assert "needs exactly" in refused(encode_idx(array) + surplus, (None,) * array.ndim)


@given(ARRAYS, st.data())
def test_any_changed_header_byte_is_refused(array: Array, draw: st.DataObject) -> None:
    data = bytearray(encode_idx(array))
    place = draw.draw(st.integers(0, 3 + 4 * array.ndim))
    data[place] ^= draw.draw(st.integers(1, 255))
    refused(bytes(data), (None,) * array.ndim)
    refused(bytes(data), array.shape)


@given(st.binary(max_size=40), st.sampled_from([(None,), (None, None, None)]))
def test_arbitrary_bytes_parse_or_are_refused_in_one_line(data: bytes, shape: tuple[None, ...]) -> None:
    arrays: list[Array] = []
    if refusal(lambda: arrays.append(parse(data, shape))) is None:
        assert encode_idx(arrays[0]) == data


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("00000d03", "magic number is 0x00000d03; allowed is 0x00000803 (uint8, 3 dimensions)"),
        ("00000801", "magic number is 0x00000801"),
        ("000008ff", "magic number is 0x000008ff"),
        ("01000803", "magic number is 0x01000803"),
        ("1f8b0803", "magic number is 0x1f8b0803"),
    ],
)
def test_wrong_magic_number_is_named(header: str, message: str) -> None:
    assert message in refused(bytes.fromhex(header) + struct.pack(">3I", 1, 1, 1) + b"x", (None, None, None))


def test_size_of_zero_is_refused() -> None:
    assert "any from 1" in refused(struct.pack(">HBB3I", 0, 8, 3, 0, 2**32 - 1, 2**32 - 1), (None, None, None))


@pytest.mark.parametrize("sizes", [(2**31, 1, 1), (2**31, 2, 1), (2**31, 2**31, 4), (2**32 - 1,) * 3])
def test_lying_header_takes_no_memory(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    """Among the products are 2**32 and 2**64: an overflow would make them 0, the number of bytes that are there."""
    path = tmp_path / "lie"
    path.write_bytes(struct.pack(">HBB3I", 0, 8, 3, *sizes))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="needs exactly"):
            read_idx(path, shape=(None, None, None))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match="there is no such file"):
            read_idx(path, shape=(None,))


@pytest.mark.parametrize(
    "array",
    [np.zeros(3, np.int8), np.zeros((2, 2), np.uint8), np.zeros((), np.uint8), np.zeros((0, 28, 28), np.uint8)],
)
def test_writer_refuses_arrays_that_reader_refuses(array: npt.NDArray[np.generic]) -> None:
    with pytest.raises(ValueError, match="array"):
        encode_idx(array)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    arrays = (np.arange(5 * 16).reshape(5, 4, 4), np.arange(5), np.ones((3, 4, 4)), np.array([0, 1, 1]))
    for name, array in zip(RAW_FILES, arrays, strict=True):
        (tmp_path / name).write_bytes(encode_idx(array.astype(np.uint8)))
    return tmp_path


def test_description_follows_the_bytes(folder: Path) -> None:
    info = describe_raw(folder, "mnist")
    assert (info.image_shape, info.num_classes) == ((4, 4), 5)
    assert info.examples == {"train": 5, "test": 3}
    assert measure_raw(folder, info)["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    (folder / RAW_FILES[3]).write_bytes(encode_idx(np.array([1, 1, 1], np.uint8)))
    assert describe_raw(folder, "mnist").digest != info.digest


def test_images_without_labels_are_one_line(folder: Path) -> None:
    (folder / RAW_FILES[1]).write_bytes(encode_idx(np.arange(4).astype(np.uint8)))
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte: 5 images, but 4 labels"):
        describe_raw(folder, "mnist")


@pytest.mark.parametrize("name", RAW_FILES)
def test_files_that_were_changed_since_are_refused(name: str, folder: Path) -> None:
    info = describe_raw(folder, "mnist")
    assert len(read_raw(folder, info).images) == 5
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"{name}: not the bytes that"):
        read_raw(folder, info)
