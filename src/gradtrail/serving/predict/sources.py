"""The images of a batch prediction: files, folders and parquet tables, read in order, one batch at a time.

Memory holds at most a batch and the names of one folder's entries; the list of files is on disk.
"""

import contextlib
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from gradtrail.support.errors import UserError, one_line, suggestion

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
COLUMN = "image"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive images of one source."""

    paths: Sequence[str]  # file of each image; or the one file of all of them
    first: int | None  # index of the first image in its file; None for files of one image
    images: Sequence[Path | bytes | None]  # image files, or their bytes; None for a missing image


@contextlib.contextmanager
def open_sources(paths: Sequence[Path]) -> Iterator[list["Source"]]:
    """Yield the sources for these paths, in their order; consecutive files and folders are one source.

    Lists of files are kept in temporary files, so that later additions to a folder are ignored.

    Raises:
        UserError: A path is missing, a table has no column of images, or there is no image at all; one line.
    """
    with contextlib.ExitStack() as stack:
        sources = list[Source]()
        for is_table, group in itertools.groupby(paths, is_parquet):
            if is_table:
                sources += [ParquetFile(path) for path in group]
            else:
                listing = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
                sources.append(Files([*group], listing))
        if not sum(source.num_images for source in sources):
            raise UserError(f"{', '.join(map(str, paths))[:200]}: no images ({', '.join(SUFFIXES)})")
        yield sources


def is_parquet(path: Path) -> bool:
    """Return whether a path is a parquet file by its name, and no folder."""
    return path.suffix.lower() == ".parquet" and not path.is_dir()


class Files:
    """Image files: those in the list, and those in folders, at any depth, sorted by name."""

    def __init__(self, paths: Sequence[Path], listing: IO[str]) -> None:
        """Write the list of the files; a missing file is an image without an answer."""
        digest = hashlib.sha256()
        self._list = listing
        self.num_images = 0
        for path in _image_files(paths):
            line = json.dumps(str(path))
            digest.update(f"{line} {_stamp(path)}\n".encode())
            self._list.write(f"{line}\n")
            self.num_images += 1
        self.identity = digest.hexdigest()

    def batches(self, start: int, size: int) -> Iterator[Batch]:
        """Yield the images from index `start` on, `size` at a time; the last batch may have fewer."""
        self._list.seek(0)
        lines = itertools.islice(self._list, start, None)
        while paths := [Path(json.loads(line)) for line in itertools.islice(lines, size)]:
            yield Batch(paths=[_as_text(path) for path in paths], first=None, images=paths)


class ParquetFile:
    """The column `image` of a parquet file: bytes of image files."""

    def __init__(self, path: Path) -> None:
        """Read the schema."""
        self._path = path
        with self._open() as file:
            _check_column(path, file.schema_arrow)
            self._group_sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self.num_images = sum(self._group_sizes)
        self.identity = f"{json.dumps(str(path))} {_stamp(path)}"

    def batches(self, start: int, size: int) -> Iterator[Batch]:
        """Yield the images from index `start` on, `size` at a time; row groups before it are not read."""
        ends = [*itertools.accumulate(self._group_sizes)]
        group = next((group for group, end in enumerate(ends) if end > start), len(ends))
        num_skipped = ends[group - 1] if group else 0
        values = itertools.islice(self._values(range(group, len(ends)), size), start - num_skipped, None)
        while images := [*itertools.islice(values, size)]:
            yield Batch(paths=[_as_text(self._path)], first=start, images=images)
            start += len(images)

    def _values(self, groups: Iterable[int], size: int) -> Iterator[bytes | None]:
        with self._open() as file:
            try:
                for batch in file.iter_batches(size, [*groups], [COLUMN], use_threads=False):
                    yield from batch.column(0).to_pylist()
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"{self._path}: damaged: {one_line(error)[:200]}") from None

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self._path, buffer_size=1 << 20, pre_buffer=False)
        except FileNotFoundError:
            raise UserError(f"{self._path}: no such file") from None
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self._path}: not a readable parquet file: {one_line(error)[:200]}") from None


# Both have `num_images`, and as `identity` what a resumed run must find again: paths, sizes and modification times.
Source: TypeAlias = Files | ParquetFile


def _check_column(path: Path, schema: pa.Schema) -> None:
    """Raise UserError unless there is one column of images."""
    if COLUMN not in schema.names:
        near = suggestion(COLUMN, schema.names)
        raise UserError(f"{path}: has no column {COLUMN!r}; it has {', '.join(schema.names)[:200]}{near}")
    if schema.names.count(COLUMN) > 1:
        raise UserError(f"{path}: has {schema.names.count(COLUMN)} columns {COLUMN!r}; must have one")
    dtype = schema.field(COLUMN).type
    if not (pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype)):
        raise UserError(f"{path}: column {COLUMN} is {dtype}; must be binary: the bytes of image files")


def _image_files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from _files_below(path)
        else:
            yield path


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the image files in a folder and its subfolders, sorted; no hidden ones, and none in linked folders."""
    try:
        with os.scandir(folder) as entries:
            names = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from None
    for name, is_folder in names:
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


def _as_text(path: Path) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")
