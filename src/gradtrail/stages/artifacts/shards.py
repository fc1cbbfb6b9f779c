"""A training split in shards: files that never change, and an index with their sizes and digests.

The folder has the name of the file of an unsharded split: `data/processed/train.npz`. Each column of each shard is an
uncompressed `.npy`, such as `00003.images.npy`; DVC pushes a changed shard alone. Reads copy parts of files and map
nothing: a process holds only the rows it requested.
"""

import concurrent.futures
import contextlib
import dataclasses
import io
import itertools
import math
import operator
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int, UInt8

from gradtrail.core.data import Split
from gradtrail.stages.common.dataset import (
    INDEX,
    DatasetInfo,
    require_unchanged,
    sha256,
)
from gradtrail.stages.common.files import read_json, write_json
from gradtrail.stages.common.params import validate
from gradtrail.support.errors import UserError

COLUMNS = tuple(field.name for field in dataclasses.fields(Split))
_MIB = 2**20
_HEADER_BYTES = 128  # of a file of an array, at least; NumPy aligns to 64


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard in the index."""

    examples: int
    files: dict[str, str]  # SHA-256 of each column's file, by column


@dataclass(frozen=True, kw_only=True)
class _Index:
    """The index of a split in shards."""

    image_shape: tuple[int, int]
    shards: list[Shard]


def write_shards(folder: Path, parts: Iterable[Split], shard_mib: int) -> int:
    """Write a split as a new folder of shards; memory holds one shard and one part.

    Args:
        folder: the new folder.
        parts: parts of the split, in its order; any sizes.
        shard_mib: most MiB of all columns of a shard; a single example may be larger.

    Returns:
        The number of examples.
    """
    folder.mkdir()
    shards: list[Shard] = []
    shape: tuple[int, ...] = ()
    for number, shard in enumerate(_regrouped(parts, shard_mib * _MIB)):
        arrays = {name: getattr(shard, name) for name in COLUMNS}
        for name, array in arrays.items():
            with _path(folder, number, name).open("wb") as stream:
                np.lib.format.write_array(stream, np.ascontiguousarray(array), allow_pickle=False)
        digests = {name: sha256(_path(folder, number, name)) for name in COLUMNS}
        shards.append(Shard(examples=len(shard), files=digests))
        shape = shard.images.shape[1:]
    write_json(folder / INDEX, {"image_shape": shape, "shards": [dataclasses.asdict(shard) for shard in shards]})
    return sum(shard.examples for shard in shards)


def join(parts: Iterable[Split]) -> Split:
    """Return parts of a split as one."""
    pieces = list(parts)
    return Split(**{name: np.concatenate([getattr(part, name) for part in pieces]) for name in COLUMNS})


def take_rows(split: Split, rows: np.ndarray | slice) -> Split:
    """Return the examples of a split at these positions."""
    return Split(**{name: getattr(split, name)[rows] for name in COLUMNS})


class ShardedSplit:
    """A split in shards, read in parts; a data source with random access, as in Grain and PyTorch.

    `split[7]` is a dict with the columns of an example. Every fault of a file is a `UserError` of one line.

    Args:
        folder: folder of the shards.
        info: description of the data set, with the digest of the index.
    """

    def __init__(self, folder: Path, info: DatasetInfo):
        require_unchanged(folder, info)
        self._folder = folder
        path = folder / INDEX
        self._index: _Index = validate(read_json(path), _Index, f"{path}: index")
        self._starts = [0, *itertools.accumulate(shard.examples for shard in self._index.shards)]
        self._offsets: dict[tuple[int, str], int] = {}
        self._check_sizes()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, example: SupportsIndex) -> dict[str, Any]:
        row = operator.index(example)
        if not 0 <= row < len(self):
            raise IndexError(f"example {row} of {len(self):,}")
        return {name: self.read_column(name, row, row + 1)[0] for name in COLUMNS}

    @property
    def image_bytes(self) -> int:
        """Bytes of the images."""
        return len(self) * math.prod(self._index.image_shape)

    def read(
        self, start: int, stop: int
    ) -> tuple[UInt8[np.ndarray, "examples height width"], Int[np.ndarray, " examples"]]:
        """Return images and labels of the examples in [start, stop)."""
        return self.read_column("images", start, stop), self.read_column("labels", start, stop)

    def read_split(self, start: int = 0, stop: int | None = None) -> Split:
        """Return the examples in [start, stop), by default all, as arrays in memory."""
        return Split(**{name: self.read_column(name, start, stop) for name in COLUMNS})

    def take(self, rows: Int[np.ndarray, " rows"]) -> Split:
        """Return the examples at these ascending positions; reads the files in between too, a shard at a time."""
        return Split(**{name: self.take_column(name, rows) for name in COLUMNS})

    def take_column(self, name: str, rows: Int[np.ndarray, " rows"]) -> np.ndarray:
        """Return a column of the examples at these ascending positions, see `take`."""
        inside = [rows[(low <= rows) & (rows < high)] for low, high in itertools.pairwise(self._starts)]
        return np.concatenate(
            [self.read_column(name, part[0], part[-1] + 1)[part - part[0]] for part in inside if len(part)]
        )

    def read_column(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return a column of the examples in [start, stop), by default of all."""
        stop = len(self) if stop is None else stop
        shape, dtype = self._form(name)
        column = np.empty((max(0, stop - start), *shape), dtype)
        for number, (first, last) in enumerate(itertools.pairwise(self._starts)):
            low, high = max(start, first), min(stop, last)
            if low < high:
                self._read_into(column[low - start : high - start], number, name, low - first)
        return column

    def verify(self) -> None:
        """Read every file; raise UserError if one has other bytes than those in the index."""
        names = [(number, name) for number in range(len(self._index.shards)) for name in COLUMNS]
        with concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="verify") as pool:
            try:
                for _ in pool.map(lambda file: self._verify(*file), names):
                    pass
            finally:
                pool.shutdown(cancel_futures=True)

    def _verify(self, number: int, name: str) -> None:
        path, shard = _path(self._folder, number, name), self._index.shards[number]
        with _file_errors(path):
            actual = sha256(path)
        if actual != shard.files[name]:
            raise UserError(
                f"{path}: not the bytes that {self._folder / INDEX} was written for; `dvc repro` makes both"
            )

    def _check_sizes(self) -> None:
        """Store the offsets of the rows; raise UserError unless every file has its header and its length."""
        for number, shard in enumerate(self._index.shards):
            for name in COLUMNS:
                path, header = _path(self._folder, number, name), self._header(name, shard.examples)
                with _file_errors(path), path.open("rb") as stream:
                    is_expected, size = stream.read(len(header)) == header, os.fstat(stream.fileno()).st_size
                self._offsets[number, name] = len(header)
                expected = len(header) + shard.examples * self._row_bytes(name)
                if not is_expected or size != expected:
                    actual = f"{size:,} bytes" if size != expected else "another header"
                    raise UserError(f"{path}: {actual}, expected {expected:,} bytes of {name}; `dvc repro` makes it")

    def _read_into(self, rows: np.ndarray, number: int, name: str, first: int) -> None:
        """Fill an array with consecutive rows of a column of a shard."""
        path = _path(self._folder, number, name)
        offset = self._offsets[number, name] + first * self._row_bytes(name)
        with _file_errors(path), path.open("rb", buffering=0) as stream:
            stream.seek(offset)
            buffer: Any = rows
            view = memoryview(buffer).cast("B")
            while len(view):
                count = stream.readinto(view)
                if not count:
                    raise UserError(f"{path}: truncated while it was read; `dvc repro` makes it")
                view = view[count:]

    def _form(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        return (self._index.image_shape, np.dtype(np.uint8)) if name == "images" else ((), np.dtype(np.int32))

    def _row_bytes(self, name: str) -> int:
        shape, dtype = self._form(name)
        return math.prod(shape) * dtype.itemsize

    def _header(self, name: str, examples: int) -> bytes:
        """Return the header of a column's file, in NumPy's format."""
        shape, dtype = self._form(name)
        stream = io.BytesIO()
        about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (examples, *shape)}
        np.lib.format.write_array_header_1_0(stream, about)
        return stream.getvalue()


def _regrouped(parts: Iterable[Split], shard_bytes: int) -> Iterator[Split]:
    """Yield the examples of `parts` in shards of at most `shard_bytes`, all but the last of one size."""
    waiting: list[Split] = []
    for part in parts:
        size = max(1, (shard_bytes - len(COLUMNS) * _HEADER_BYTES) // sum(_row(part, name).nbytes for name in COLUMNS))
        waiting.append(part)
        while sum(map(len, waiting)) >= size:
            whole = join(waiting)
            yield take_rows(whole, slice(0, size))
            waiting = [take_rows(whole, slice(size, None))]
    if sum(map(len, waiting)):
        yield join(waiting)


def _row(split: Split, name: str) -> np.ndarray:
    return getattr(split, name)[:1]


def _path(folder: Path, number: int, name: str) -> Path:
    return folder / f"{number:05d}.{name}.npy"


@contextlib.contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a UserError of one line."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `dvc repro` makes it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
