"""IDX files and splits: what was written is read, everything else is refused in one line."""

import dataclasses
import io
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from factories import dataset_info, random_split
from fuzzing import refusal
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradtrail.core.data import Split
from gradtrail.stages.data import data_files
from gradtrail.stages.data.data_files import (
    COLUMNS,
    RAW_FILES,
    describe_raw,
    encode_idx,
    measure_raw,
    read_idx,
    read_info,
    read_samples,
    read_split,
    read_splits,
    write_processed,
)
from gradtrail.stages.data.parquet import read_parquet
from gradtrail.support.errors import UserError

Array = npt.NDArray[np.uint8]
SHAPES = st.sampled_from([1, 3, 4]).flatmap(lambda ndim: st.tuples(*[st.integers(1, 40 if ndim == 1 else 5)] * ndim))
ARRAYS = hnp.arrays(np.uint8, SHAPES)


def parse(data: bytes, ndim: int) -> Array:
    """Return the array in a file with these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "some-file").write_bytes(data)
        return read_idx(Path(folder) / "some-file", (ndim,))


def refused(data: bytes, ndim: int) -> str:
    """Return the message with which `data` are refused."""
    line = refusal(lambda: parse(data, ndim))
    assert line is not None
    assert "/some-file: " in line
    return line


@given(ARRAYS)
def test_round_trip(array: Array) -> None:
    decoded = parse(encode_idx(array), array.ndim)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, array)


def test_known_bytes() -> None:
    data = bytes.fromhex("00000803 00000002 00000001 00000003 010203 0405ff")
    np.testing.assert_array_equal(parse(data, 3), [[[1, 2, 3]], [[4, 5, 255]]])


@given(ARRAYS, st.data())
def test_damaged_file_is_refused_in_one_line(array: Array, draw: st.DataObject) -> None:
    """Cut off, too long, or with another byte in its header."""
    data = encode_idx(array)
    changed = bytearray(data)
    changed[draw.draw(st.integers(0, 3 + 4 * array.ndim))] ^= draw.draw(st.integers(1, 255))
    cut, surplus = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.binary(min_size=1, max_size=50))
    for damaged in (data[:cut], data + surplus, bytes(changed)):
        refused(damaged, array.ndim)


@pytest.mark.parametrize(
    ("magic", "sizes", "message"),
    [
        ("00000d03", (1, 1, 1), "magic number is 0x00000d03; allowed is 0x00000803 (uint8, 3 dimensions)"),
        ("1f8b0803", (1, 1, 1), "magic number is 0x1f8b0803"),
        ("00000803", (0, 2**32 - 1, 2**32 - 1), "each must be at least 1"),
        ("00000803", (2**31, 2, 1), "needs exactly"),  # 2**32 bytes: an overflow would make them 0
    ],
)
def test_wrong_header_is_named_and_takes_no_memory(magic: str, sizes: tuple[int, ...], message: str) -> None:
    tracemalloc.start()
    try:
        assert message in refused(bytes.fromhex(magic) + struct.pack(">3I", *sizes) + b"x", 3)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_idx(path, (1,))


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


# Splits.


FILES = np.array([f"cat/{number}.png" for number in range(9)])
SPLIT = dataclasses.replace(random_split(9), true_labels=np.zeros(9, np.int32), files=FILES)
SPLITS = {"train": SPLIT, "validation": random_split(4), "test": random_split(3)}
INFO = dataset_info()


def assert_equal(left: Split, right: Split) -> None:
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        assert np.asarray(getattr(left, name)).dtype == np.asarray(getattr(right, name)).dtype


def test_processed_folder_comes_back(tmp_path: Path) -> None:
    info = write_processed(tmp_path / "processed", SPLITS, INFO)
    assert info == read_info(tmp_path / "processed")
    assert info == dataclasses.replace(INFO, examples={"train": 9, "validation": 4, "test": 3})
    for name, split in read_splits(tmp_path / "processed").items():
        assert_equal(split, SPLITS[name])
        assert not split.images.flags.writeable


def test_large_training_split_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_processed(tmp_path / "processed", SPLITS, INFO)
    assert len(read_samples(tmp_path / "processed")["train"]) == 9
    monkeypatch.setattr(data_files, "SAMPLE", 3)
    sampled = read_samples(tmp_path / "processed")
    assert_equal(sampled["train"], SPLIT[np.array([0, 3, 6])])
    assert_equal(sampled["test"], SPLITS["test"])


def test_split_without_examples_is_refused(tmp_path: Path) -> None:
    empty = SPLITS | {"validation": SPLIT[:0]}
    with pytest.raises(UserError, match=r"leaves no validation example; found .*'validation': 0"):
        write_processed(tmp_path / "processed", empty, INFO)


def test_missing_or_foreign_file_is_one_line(tmp_path: Path) -> None:
    assert refusal(lambda: read_split(tmp_path)) == f"{tmp_path / COLUMNS[0]}.npy: no such file; `dvc repro` makes it"
    assert refusal(lambda: read_info(tmp_path)) == f"{tmp_path}/dataset.json: no such file; `dvc repro` makes it"
    (tmp_path / "dataset.json").write_text('{"name": "digits"}')
    assert f"{tmp_path}/dataset.json" in str(refusal(lambda: read_info(tmp_path)))


@pytest.mark.parametrize("part", [1, 4 * SPLIT.images[0].size])
def test_measures_of_the_splits_do_not_depend_on_the_part(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_PART", part)
    measured = data_files.measure_splits(SPLITS)
    assert (measured["train_examples"], measured["test_examples"]) == (9, 3)
    assert measured["noisy_labels"] == np.sum(SPLIT.labels != 0)
    assert measured["pixel_mean"] == pytest.approx(np.mean(SPLIT.images / 255.0), rel=1e-12)
    assert measured["pixel_std"] == pytest.approx(np.std(SPLIT.images / 255.0), rel=1e-12)


# Tables.


TABLE = pd.DataFrame({"number": [1, 2, 3], "word": ["a", "b", "c"], "share": [0.5, 0.25, 1.0]})


def encoded() -> bytes:
    stream = io.BytesIO()
    TABLE.to_parquet(stream, index=False)
    return stream.getvalue()


def test_columns_are_read_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(encoded())
    pd.testing.assert_frame_equal(read_parquet(tmp_path / "a.parquet", ["share", "word"]), TABLE[["share", "word"]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encoded(), "not a table of this project: No match"),
        (encoded()[:-1], "not a table of this project: "),
        (b"", "not a table of this project: "),
        (None, "no such file"),
    ],
)
def test_missing_or_truncated_table_or_a_missing_column_is_one_line(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    if content is not None:
        path.write_bytes(content)
    line = refusal(lambda: read_parquet(path, ["number", "none"], made_by="it"))
    assert line is not None
    assert line.startswith(f"{path}: {message}")
    assert "`it` makes it" in line
