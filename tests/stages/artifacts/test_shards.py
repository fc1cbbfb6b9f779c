"""A split in shards round-trips, in any parts; a damaged or missing shard or table is one line."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factories import SHAPE, dataset_info, random_split
from untrusted import refusal

from gradtrail.core.data import Split
from gradtrail.stages.artifacts.parquet import read_parquet
from gradtrail.stages.artifacts.shards import COLUMNS, ShardedSplit, take_rows, write_shards
from gradtrail.stages.common.dataset import DatasetInfo, read_json, sha256

SPLIT = random_split(70_000, shape=SHAPE)  # of 32 bytes each: three shards of at most a MiB
SIZE = int((2**20 - len(COLUMNS) * 128) // (np.prod(SHAPE) + 5 * 4))


def parts(split: Split, size: int) -> list[Split]:
    return [take_rows(split, slice(start, start + size)) for start in range(0, len(split), size)]


def described(folder: Path) -> DatasetInfo:
    return dataset_info(image_shape=SHAPE, files={folder.name: sha256(folder / "index.json")})


def opened(folder: Path) -> ShardedSplit:
    return ShardedSplit(folder, described(folder))


def refused(read: Callable[[], object], file: Path) -> str:
    """The one line of a refusal, which names the file."""
    line = refusal(read)
    assert line is not None
    assert line.startswith(str(file))
    return line


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split") / "train.npz"
    assert write_shards(folder, parts(SPLIT, 9_999), 1) == len(SPLIT)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    new = tmp_path / "train.npz"
    new.mkdir()
    for file in written.iterdir():
        (new / file.name).write_bytes(file.read_bytes())
    return new


def assert_equal(left: Split, right: Split) -> None:
    for field in dataclasses.fields(Split):
        one, other = getattr(left, field.name), getattr(right, field.name)
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_shards_round_trip(written: Path) -> None:
    split = opened(written)
    split.verify()
    assert len(split) == len(SPLIT)
    assert split.image_bytes == SPLIT.images.nbytes
    assert_equal(split.read_split(), SPLIT)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (SIZE - 1, SIZE + 1), (5, 69_999), (SIZE, 2 * SIZE), (7, 7)])
def test_any_part_of_it_is_read_across_shards(written: Path, start: int, stop: int) -> None:
    split = opened(written)
    assert_equal(split.read_split(start, stop), take_rows(SPLIT, slice(start, stop)))
    images, labels = split.read(start, stop)
    np.testing.assert_array_equal(images, SPLIT.images[start:stop])
    np.testing.assert_array_equal(labels, SPLIT.labels[start:stop])


def test_rows_and_single_examples_are_read(written: Path) -> None:
    split = opened(written)
    rows = np.array([0, 3, SIZE - 1, SIZE, 69_999])
    assert_equal(split.take(rows), take_rows(SPLIT, rows))
    np.testing.assert_array_equal(split.take_column("example_id", rows), SPLIT.example_id[rows])
    example = split[np.int64(SIZE)]
    assert example.keys() == set(COLUMNS)
    np.testing.assert_array_equal(example["images"], SPLIT.images[SIZE])
    with pytest.raises(IndexError):
        split[len(SPLIT)]


def test_shard_is_as_large_as_asked_and_numpy_reads_it(written: Path) -> None:
    index = read_json(written / "index.json")
    assert [shard["examples"] for shard in index["shards"]] == [SIZE, SIZE, 70_000 - 2 * SIZE]
    size = sum(file.stat().st_size for file in written.glob("00000.*"))
    assert 2**20 - 32 < size <= 2**20
    np.testing.assert_array_equal(np.load(written / "00001.images.npy"), SPLIT.images[SIZE : 2 * SIZE])


def test_changed_example_changes_only_the_shard_that_has_it(written: Path, tmp_path: Path) -> None:
    changed = dataclasses.replace(SPLIT, images=SPLIT.images.copy())
    changed.images[SIZE] ^= 1
    write_shards(tmp_path / "train.npz", [changed], 1)
    before, after = (
        {file.name: sha256(file) for file in folder.iterdir()} for folder in (written, tmp_path / "train.npz")
    )
    assert {name for name in before if before[name] != after[name]} == {"00001.images.npy", "index.json"}


def test_missing_cut_or_changed_shard_is_refused_in_one_line(folder: Path) -> None:
    split, file = opened(folder), folder / "00001.images.npy"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "not the bytes" in refused(split.verify, file)
    file.write_bytes(content[:1000])
    assert "expected" in refused(lambda: opened(folder), file)
    assert "truncated while it was read" in refused(lambda: split.read(SIZE, 2 * SIZE), file)
    file.write_bytes(b"\x93NUMPX" + content[6:])
    assert "another header" in refused(lambda: opened(folder), file)
    file.unlink()
    assert "no such file" in refused(lambda: opened(folder), file)
    assert "no such file" in refused(lambda: split.read(SIZE, 2 * SIZE), file)


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
