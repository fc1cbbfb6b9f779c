"""Damaged IDX files, gzip streams and splits: one line, or what was written; no memory that they only claim."""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import dataset_info, random_split
from hypothesis import given
from hypothesis import strategies as st
from untrusted import MAX_BYTES, damaged, fuzz, on_linux, refusal, taken_bytes

from gradtrail.core.common.split import Split
from gradtrail.stages.artifacts.idx import RAW_FILES, encode_idx, read_raw
from gradtrail.stages.common import dataset
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.stages.fetch.download import KnownFile, WrongBytesError, read_chunks, write_verified

SPLIT, INFO = random_split(6), dataset_info()
RAW = {name: encode_idx(SPLIT.images if "images" in name else SPLIT.labels.astype(np.uint8)) for name in RAW_FILES}
FILE_NAME = RAW_FILES[0]
CONTENT = RAW[FILE_NAME]
PACKED = gzip.compress(CONTENT, mtime=0)
FILE = KnownFile(name="images", max_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


def described(*paths: Path) -> DatasetInfo:
    """Return a description that the bytes of files agree with: whoever forged them wrote it too."""
    return dataset_info(files={path.name: dataset.sha256(path) for path in paths})


# The raw folder.


def refused_raw(folder: Path) -> str | None:
    return refusal(lambda: read_raw(folder, described(*(folder / name for name in RAW_FILES))))


def write_raw(folder: Path, **changed: bytes) -> None:
    for name, data in (RAW | changed).items():
        (folder / name).write_bytes(data)


@fuzz(100)
@given(name=st.sampled_from(RAW_FILES), data=st.data())
def test_a_damaged_raw_folder_is_read_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    write_raw(tmp_path, **{name: data.draw(damaged(RAW[name]))})
    refused_raw(tmp_path)


@on_linux
@pytest.mark.parametrize("sizes", [(2**32 - 1,) * 3, (2**31, 2, 1), (6, 2**16, 2**16)])
def test_a_raw_folder_takes_no_memory_for_what_a_header_claims(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    write_raw(tmp_path, **{RAW_FILES[2]: struct.pack(">HBB3I", 0, 8, 3, *sizes) + bytes(100)})
    assert taken_bytes(lambda: refused_raw(tmp_path)) < MAX_BYTES
    assert "needs exactly" in (refused_raw(tmp_path) or "")


# Gzip.


@fuzz(100)
@given(data=damaged(PACKED))
def test_a_damaged_gzip_file_unpacks_to_the_file_or_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "packed").write_bytes(data)
    with contextlib.suppress(WrongBytesError):
        write_verified(FILE, read_chunks(tmp_path / "packed", gzipped=True), tmp_path / "to")
        assert (tmp_path / "to").read_bytes() == CONTENT


@on_linux
@pytest.mark.parametrize("known", [True, False])
def test_a_gzip_bomb_takes_no_memory_and_leaves_no_file(tmp_path: Path, *, known: bool) -> None:
    packer = zlib.compressobj(1, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    (tmp_path / "packed").write_bytes(bomb)
    file = FILE if known else KnownFile(name="images", max_bytes=100 << 20, sha256=None)

    def unpack() -> None:
        with pytest.raises(WrongBytesError, match="more than"):
            write_verified(file, read_chunks(tmp_path / "packed", gzipped=True), tmp_path / "to" / "images")

    assert taken_bytes(unpack) < MAX_BYTES
    assert list((tmp_path / "to").iterdir()) == []


# Splits.


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a split's file is made of."""
    path = tmp_path_factory.mktemp("split") / "train.npz"
    dataset.write_split(path, SPLIT)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


def refused_split(path: Path, data: bytes) -> str | None:
    """Return the line with which a split's file is refused; None where it is read, and whole."""
    path.write_bytes(data)

    def read() -> None:
        split = dataset.read_split(path, described(path))
        assert all(len(getattr(split, field.name)) == len(split) for field in dataclasses.fields(Split))

    return refusal(read)


@fuzz(100)
@given(data=st.data())
def test_a_damaged_zip_of_a_split_is_read_or_refused(
    tmp_path: Path, members: dict[str, bytes], data: st.DataObject
) -> None:
    refused_split(tmp_path / "train.npz", data.draw(damaged(zipped(members))))


@fuzz(100)
@given(data=st.data())
def test_a_damaged_array_under_a_right_checksum_is_read_or_refused(
    tmp_path: Path, members: dict[str, bytes], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(members)))
    changed = data.draw(damaged(members[name][:128])) + members[name][128:]
    refused_split(tmp_path / "train.npz", zipped({**members, name: changed}))


def npy(description: str) -> bytes:
    text = f"{description.ljust(117)}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


HEADERS = {
    "of a million million": "{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000,), }",
    "of nothing, very often": "{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,), }",
    "of a negative size": "{'descr': '<i4', 'fortran_order': False, 'shape': (-1,), }",
    "beyond 64 bits": "{'descr': '<i4', 'fortran_order': False, 'shape': (0, 1000000000000000000000000), }",
    "of many digits": f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({'9' * 4500},), }}",
    "of a record": "{'descr': [('a', '<i4', (1000000000,))], 'fortran_order': False, 'shape': (1,), }",
    "deeply nested": "(" * 9000,
    "of many signs": "-" * 9000 + "1",
    "with mixed keys": "{1: 2, 'a': 3}",
    "with an open string": "{'descr': '",
}


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("name", ["images.npy", "labels.npy"])
def test_a_header_that_is_none_is_refused(tmp_path: Path, members: dict[str, bytes], name: str, header: str) -> None:
    assert refused_split(tmp_path / "train.npz", zipped({**members, name: npy(HEADERS[header])}))


@pytest.mark.parametrize("content", [b"", b"raw bytes", b"\x93NUMPY", b"\x93NUMPY\x03\x00"])
def test_a_member_that_is_no_array_is_refused(tmp_path: Path, members: dict[str, bytes], content: bytes) -> None:
    assert refused_split(tmp_path / "train.npz", zipped({**members, "labels.npy": content}))


@on_linux
def test_a_bomb_in_a_split_takes_no_memory(tmp_path: Path, members: dict[str, bytes]) -> None:
    header = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (9000000, 4, 3), }")
    packed = zipped({**members, "images.npy": header + bytes(9_000_000 * 12)}, zipfile.ZIP_DEFLATED)
    assert taken_bytes(lambda: refused_split(tmp_path / "train.npz", packed)) < MAX_BYTES
    assert "compressed" in (refused_split(tmp_path / "train.npz", packed) or "")


def test_a_directory_that_claims_more_than_there_is_is_refused(tmp_path: Path, members: dict[str, bytes]) -> None:
    data = zipped(members)
    size = len(members["images.npy"])
    entry = data.index(b"PK\x01\x02")
    changed = data[:entry] + data[entry:].replace(struct.pack("<I", size), struct.pack("<I", 2**32 - 2), 2)
    assert refused_split(tmp_path / "train.npz", changed)


# The description of a data set.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@fuzz(60)
@given(key=st.sampled_from([field.name for field in dataclasses.fields(INFO)]), value=JSON)
def test_any_value_in_the_description_is_read_or_refused(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps({**dataclasses.asdict(INFO), key: value}))
    refusal(lambda: dataset.read_info(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_classes", 10**12),
        ("num_classes", 0),
        ("image_shape", [0, 3]),
        ("image_shape", [-4, -3]),
        ("examples", {"train": -1}),
        ("examples", {"two\nlines": -1}),
    ],
)
def test_sizes_that_no_data_set_has_are_refused_by_their_key(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps({**dataclasses.asdict(INFO), key: value}))
    assert f"dataset.{key}" in (refusal(lambda: dataset.read_info(tmp_path)) or "")


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"9" * 5000, b"NaN"])
def test_json_that_breaks_parsers_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dataset.json").write_bytes(content)
    assert refusal(lambda: dataset.read_info(tmp_path))
