"""The IDX format, in which MNIST was published: a big-endian header, then the bytes of one uint8 array.

A header is untrusted: it is compared with the length of the file before an array is allocated. Out of scope: other
element types than uint8, other numbers of dimensions than 1 and 3, and gzip.

Also the data set as `fetch` leaves it in `data/raw`: four IDX files, whatever the data set.
"""

import hashlib
import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrail.stages.common.dataset import DatasetInfo, require_unchanged, sha256
from gradtrail.support.errors import UserError

_UINT8_CODE = 0x08
_ALLOWED_NDIMS = (1, 3)
_MAX_SIZE = 2**32 - 1

Shape = tuple[int | None, ...]


def read_idx(path: Path, *, shape: Shape) -> npt.NDArray[np.uint8]:
    """Read an IDX file of uint8.

    Args:
        path: the file, uncompressed.
        shape: sizes that the header must declare, 1 or 3 of them; None allows any size from 1.

    Returns:
        Array of `shape`, uint8, writable.

    Raises:
        UserError: the file is missing, unreadable or no regular file, or its header does not declare `shape`, or the
            data are shorter or longer than the header declares. Refused before memory of the declared size is taken.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; an IDX file is needed")
    try:
        with path.open("rb") as file:
            header = file.read(4 + 4 * len(shape))
            sizes = _check_header(header, os.fstat(file.fileno()).st_size, name=str(path), shape=shape)
            return np.fromfile(file, dtype=np.uint8, count=math.prod(sizes)).reshape(sizes)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def encode_idx(array: npt.NDArray[Any]) -> bytes:
    """Encode an array as the bytes of an IDX file.

    Args:
        array: uint8 with 1 or 3 dimensions, each of size 1 to 2**32 - 1, in any memory layout.

    Returns:
        The bytes of a file that `read_idx` reads as an equal array; equal arrays give equal bytes.

    Raises:
        ValueError: another dtype, number of dimensions or size.
    """
    if array.dtype != np.uint8 or array.ndim not in _ALLOWED_NDIMS:
        raise ValueError(f"array is {array.dtype} with {array.ndim} dimensions; IDX here is uint8 with 1 or 3")
    if not all(1 <= size <= _MAX_SIZE for size in array.shape):
        raise ValueError(f"array has shape {array.shape}; each size must be 1 to {_MAX_SIZE}")
    return struct.pack(f">HBB{array.ndim}I", 0, _UINT8_CODE, array.ndim, *array.shape) + array.tobytes()


def _check_header(header: bytes, num_bytes: int, *, name: str, shape: Shape) -> tuple[int, ...]:
    """Return the sizes that `header` declares; raise unless they fit `shape` and the file's length in bytes."""
    if len(header) < (header_bytes := 4 + 4 * len(shape)):
        raise UserError(f"{name}: only {len(header)} bytes; the header alone has {header_bytes}")
    zeros, code, ndim = struct.unpack_from(">HBB", header)
    if (zeros, code, ndim) != (0, _UINT8_CODE, len(shape)):
        allowed = f"0x{_UINT8_CODE << 8 | len(shape):08x} (uint8, {len(shape)} dimensions)"
        raise UserError(f"{name}: magic number is 0x{header[:4].hex()}; allowed is {allowed}")
    sizes: tuple[int, ...] = struct.unpack_from(f">{ndim}I", header, 4)
    _check_sizes(sizes, name=name, shape=shape)
    declared = len(header) + math.prod(sizes)  # Python's integers: the product cannot overflow
    if num_bytes != declared:
        raise UserError(f"{name}: {num_bytes} bytes; a header with sizes {sizes} needs exactly {declared}")
    return sizes


def _check_sizes(sizes: tuple[int, ...], *, name: str, shape: Shape) -> None:
    """Raise unless every size is the one in `shape`, or at least 1 if that is None."""
    for size, allowed_size in zip(sizes, shape, strict=True):
        if size != allowed_size if allowed_size is not None else size < 1:
            allowed = tuple("any from 1" if one is None else one for one in shape)
            raise UserError(f"{name}: header declares sizes {sizes}; allowed are {allowed}")


RAW_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True, kw_only=True)
class RawData:
    """The four arrays of a raw folder, uint8, in the original order."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def read_raw(folder: Path, info: DatasetInfo) -> RawData:
    """Read the IDX files of a folder; raise UserError if one has other bytes than those described."""
    for name in RAW_FILES:
        require_unchanged(folder / name, info)
    return _read(folder)


def _read(folder: Path) -> RawData:
    """Read the IDX files of a folder; raise UserError if one is damaged or they do not fit together."""
    images, labels, test_images, test_labels = (
        read_idx(folder / name, shape=(None, None, None) if "images" in name else (None,)) for name in RAW_FILES
    )
    for part, length, name in ((images, len(labels), RAW_FILES[0]), (test_images, len(test_labels), RAW_FILES[2])):
        if len(part) != length:
            raise UserError(f"{folder / name}: {len(part)} images, but {length} labels")
    if images.shape[1:] != test_images.shape[1:]:
        sizes = f"{test_images.shape[1:]} pixels, but {images.shape[1:]} in {RAW_FILES[0]}"
        raise UserError(f"{folder / RAW_FILES[2]}: images of {sizes}")
    return RawData(images=images, labels=labels, test_images=test_images, test_labels=test_labels)


def describe_raw(folder: Path, name: str) -> DatasetInfo:
    """Describe the IDX files of a folder; raise UserError if they are damaged, or hold a single class."""
    raw = _read(folder)
    num_classes = int(max(raw.labels.max(), raw.test_labels.max())) + 1
    if num_classes < 2:
        raise UserError(f"{folder / RAW_FILES[1]}: every label is 0; at least 2 classes are needed")
    files = {file: sha256(folder / file) for file in RAW_FILES}
    return DatasetInfo(
        name=name,
        digest=hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        image_shape=(raw.images.shape[1], raw.images.shape[2]),
        num_classes=num_classes,
        examples={"train": len(raw.labels), "test": len(raw.test_labels)},
        files=files,
    )


def measure_raw(folder: Path, info: DatasetInfo) -> dict[str, float]:
    """Return the metrics of a raw folder."""
    counts = {f"{name}_examples": count for name, count in info.examples.items()}
    return {**counts, "bytes": sum((folder / name).stat().st_size for name in RAW_FILES)}
