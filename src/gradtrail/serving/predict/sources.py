"""Where images of a batch prediction come from: files and folders, parquet, npz; read in order, a batch at a time.

Nothing here holds more than a batch, besides the names of one folder's entries; a list of files is kept on disk.
"""

import contextlib
import hashlib
import itertools
import json
import lzma
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gradtrail.support.errors import UserError, one_line, suggestion

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
COLUMN, MEMBER = "image", "images"  # of a parquet, of an npz
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, ValueError, OSError, EOFError)  # what reading an npz raises


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive images of one source, as they were found.

    Attributes:
        paths: of the file of each image; or of the one file that has them all.
        first: number of the first one in that file; None for files of one image each.
        images: paths of files; or values of a column; or pixels, uint8 (images, height, width).
    """

    paths: Sequence[str]
    first: int | None
    images: Sequence[Path] | pa.Array | np.ndarray

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)


class Source(Protocol):
    """Images in a fixed order.

    Attributes:
        num_images: in all.
        identity: what a resumed run must find again: paths, sizes in bytes, times of the last change.
    """

    num_images: int
    identity: str

    def batches(self, start: int, size: int) -> Iterator[Batch]:
        """Yield the images from number `start` on, `size` at a time; the last batch may have fewer."""
        ...


@contextlib.contextmanager
def opened(paths: Sequence[Path], shape: tuple[int, int]) -> Iterator[list[Source]]:
    """Yield the sources that paths name, in their order; files of images and folders in a row are one source.

    Lists of files are kept in temporary files, so that what is added to a folder later is no part of them.

    Raises:
        UserError: a path is missing, or is none of these; a table does not have images of this shape; or there is no
            image at all; one line.
    """
    with contextlib.ExitStack() as stack:
        sources = list[Source]()
        for suffix, group in itertools.groupby(paths, table_suffix):
            if suffix:
                kind = ParquetFile if suffix == ".parquet" else NpzFile
                sources += [kind(path, shape) for path in group]
            else:
                listing = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
                sources.append(Files([*group], listing))
        if not sum(source.num_images for source in sources):
            raise UserError(f"{', '.join(map(str, paths))[:200]}: no images ({', '.join(SUFFIXES)})")
        yield sources


def table_suffix(path: Path) -> str:
    """Return `.parquet` or `.npz` for a file of many images, else an empty text."""
    suffix = path.suffix.lower()
    return suffix if suffix in (".parquet", ".npz") and not path.is_dir() else ""


class Files:
    """Files of one image each: those that are named, and those in folders, at any depth, sorted by name."""

    def __init__(self, paths: Sequence[Path], listing: IO[str]) -> None:
        """Write the list of the files; one that is missing is an image without an answer."""
        digest = hashlib.sha256()
        self._list = listing
        self.num_images = 0
        for path in _files(paths):
            line = json.dumps(str(path))
            digest.update(f"{line} {_stamp(path)}\n".encode())
            self._list.write(f"{line}\n")
            self.num_images += 1
        self.identity = digest.hexdigest()

    def batches(self, start: int, size: int) -> Iterator[Batch]:
        """Yield the files from number `start` on."""
        self._list.seek(0)
        lines = itertools.islice(self._list, start, None)
        while found := [Path(json.loads(line)) for line in itertools.islice(lines, size)]:
            yield Batch(paths=[_text(path) for path in found], first=None, images=found)


class ParquetFile:
    """The column `image`: bytes of image files, or uint8 pixels as lists or as binary of a fixed length."""

    def __init__(self, path: Path, shape: tuple[int, int]) -> None:
        """Read the schema."""
        self._path = path
        with self._open() as file:
            self._column = _image_column(path, file.schema_arrow, shape[0] * shape[1])
            self._rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        self.num_images = sum(self._rows)
        self.identity = f"{json.dumps(str(path))} {_stamp(path)}"

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self._path, buffer_size=1 << 20, pre_buffer=False)
        except FileNotFoundError:
            raise UserError(f"{self._path}: no such file") from None
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self._path}: not a readable parquet file: {one_line(error)[:200]}") from None

    def batches(self, start: int, size: int) -> Iterator[Batch]:
        """Yield the rows from number `start` on; row groups before it are not read."""
        group, skipped = 0, 0
        while group < len(self._rows) and skipped + self._rows[group] <= start:
            skipped += self._rows[group]
            group += 1
        with self._open() as file:
            arrays = file.iter_batches(size, [*range(group, len(self._rows))], [self._column])
            columns = (_child(part.column(0), self._column) for part in self._readable(arrays))
            number = start
            for array in _regrouped(columns, start - skipped, size):
                yield Batch(paths=[_text(self._path)], first=number, images=array)
                number += len(array)

    def _readable(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self._path}: damaged: {one_line(error)[:200]}") from None


class NpzFile:
    """The array `images`, uint8 (images, height, width), of an npz; it is never unpacked as a whole."""

    def __init__(self, path: Path, shape: tuple[int, int]) -> None:
        """Read the header of the array."""
        self._path, self._shape = path, shape
        try:
            with zipfile.ZipFile(path) as archive, archive.open(f"{MEMBER}.npy") as file:
                found, is_fortran, dtype = _read_header(file)
                length = archive.getinfo(f"{MEMBER}.npy").file_size - file.tell()
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except KeyError:
            raise UserError(f"{path}: has no array {MEMBER!r}") from None
        except (*_DAMAGED, NotImplementedError, RuntimeError) as error:
            raise UserError(f"{path}: not a readable npz: {one_line(error)[:200]}") from None
        if dtype != np.uint8 or found[1:] != shape or is_fortran:
            said = f"{dtype} {found}{', column by column' if is_fortran else ''}"
            raise UserError(f"{path}: {MEMBER} is {said}; must be uint8 (images, {shape[0]}, {shape[1]})")
        if found[0] < 0 or found[0] * shape[0] * shape[1] != length:
            raise UserError(f"{path}: damaged: {MEMBER} has {length:,} bytes, which are not {found[0]:,} images")
        self.num_images = found[0]
        self.identity = f"{json.dumps(str(path))} {_stamp(path)}"

    def batches(self, start: int, size: int) -> Iterator[Batch]:
        """Yield the images from number `start` on."""
        length = self._shape[0] * self._shape[1]
        try:
            with zipfile.ZipFile(self._path) as archive, archive.open(f"{MEMBER}.npy") as file:
                _read_header(file)
                file.seek(start * length, os.SEEK_CUR)
                for number in range(start, self.num_images, size):
                    count = min(size, self.num_images - number)
                    data = file.read(count * length)
                    if len(data) < count * length:
                        raise ValueError("it ends early")
                    pixels = np.frombuffer(data, np.uint8).reshape(-1, *self._shape)
                    yield Batch(paths=[_text(self._path)], first=number, images=pixels)
        except _DAMAGED as error:
            raise UserError(f"{self._path}: damaged: {one_line(error)[:200]}") from None


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of a `.npy`: shape, whether it is stored column by column, dtype."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


def _image_column(path: Path, schema: pa.Schema, length: int) -> str:
    """Return the dotted name of the column; raise UserError where its type holds no images of `length` pixels."""
    if COLUMN not in schema.names:
        near = suggestion(COLUMN, schema.names)
        raise UserError(f"{path}: has no column {COLUMN!r}; it has {', '.join(schema.names)[:200]}{near}")
    if schema.names.count(COLUMN) > 1:
        raise UserError(f"{path}: has {schema.names.count(COLUMN)} columns {COLUMN!r}; must have one")
    kind, name = schema.field(COLUMN).type, COLUMN
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:  # as Hugging Face's datasets keep images
        kind, name = kind.field("bytes").type, f"{COLUMN}.bytes"
    if pa.types.is_fixed_size_list(kind):
        is_right = kind.value_type == pa.uint8() and kind.list_size == length
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        is_right = kind.value_type == pa.uint8()
    elif pa.types.is_fixed_size_binary(kind):
        is_right = kind.byte_width == length
    else:
        is_right = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    if not is_right:
        raise UserError(f"{path}: column {name} is {kind}; must be binary (image files), or {length} uint8 pixels")
    return name


def _child(column: pa.Array, name: str) -> pa.Array:
    """Return the values of a column that was read by its dotted name; a missing struct has a missing child."""
    return column.flatten()[0] if "." in name else column


def _regrouped(arrays: Iterable[pa.Array], skip: int, size: int) -> Iterator[pa.Array]:
    """Cut arrays anew, `size` values each, after leaving `skip` values out."""
    waiting, count = list[Any](), 0
    for array in arrays:
        left = min(skip, len(array))
        skip, rest = skip - left, array.slice(left)
        while len(rest):
            taken = rest.slice(0, size - count)
            waiting, count, rest = [*waiting, taken], count + len(taken), rest.slice(len(taken))
            if count == size:
                yield pa.concat_arrays(waiting)
                waiting, count = [], 0
    if waiting:
        yield pa.concat_arrays(waiting)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from _files_below(path)
        else:
            yield path


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the image files in a folder and in those in it, sorted; none that is hidden or in a linked folder."""
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from None
    for name, is_folder in found:
        if name.startswith("."):
            continue
        if is_folder:
            yield from _files_below(folder / name)
        elif name.lower().endswith(SUFFIXES):
            yield folder / name


def _stamp(path: Path) -> str:
    try:
        about = path.stat()
    except OSError:
        return "missing"
    return f"{about.st_size} {about.st_mtime_ns}"


def _text(path: Path) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")
