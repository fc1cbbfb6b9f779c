"""Batches of image files and pixels → one array, decoded by several threads ahead of the model."""

import functools
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import UInt8

from gradtrail.serving.predict.images import decode_image
from gradtrail.serving.predict.sources import Batch
from gradtrail.stages.datasets.catalog import Framing
from gradtrail.support.errors import UserError
from gradtrail.support.running_time import allowed_cores

_AHEAD = 3  # batches that are decoded or being decoded while the model computes
_PIECE = 32  # files that a thread decodes at a time

Decode = Callable[[Path | BinaryIO], UInt8[np.ndarray, "height width"]]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A batch that the model takes.

    Attributes:
        batch: what it was made from.
        images: uint8 (images, height, width); black where there is an error.
        errors: why an image cannot be used, by its place in the batch; one line.
    """

    batch: Batch
    images: UInt8[np.ndarray, "images height width"]
    errors: dict[int, str]


def decoded(batches: Iterable[Batch], shape: tuple[int, int], framing: Framing | None) -> Iterator[Decoded]:
    """Decode batches in their order, a few of them ahead; pixels are taken as they are."""
    decode = functools.partial(decode_image, shape=shape, framing=framing)
    waiting: deque[tuple[Batch, list[Future[_Piece]] | _Piece]] = deque()
    with ThreadPoolExecutor(allowed_cores(), "decode") as pool:
        for batch in batches:
            pieces: list[Future[_Piece]] | _Piece
            if isinstance(batch.images, np.ndarray):
                pieces = _Piece(batch.images, {})
            elif _is_encoded(batch.images):
                starts = range(0, len(batch), _PIECE)
                parts = [batch.images[start : start + _PIECE] for start in starts]
                pieces = [pool.submit(_decode_files, part, shape, decode) for part in parts]
            else:
                pieces = _pixels(batch.images, shape)
            waiting.append((batch, pieces))
            if len(waiting) > _AHEAD:
                yield _joined(*waiting.popleft())
        while waiting:
            yield _joined(*waiting.popleft())


@dataclass(frozen=True)
class _Piece:
    images: UInt8[np.ndarray, "images height width"]
    errors: dict[int, str]


def _is_encoded(images: Sequence[Path] | pa.Array) -> bool:
    return not isinstance(images, pa.Array) or pa.types.is_binary(images.type) or pa.types.is_large_binary(images.type)


def _joined(batch: Batch, pieces: list[Future[_Piece]] | _Piece) -> Decoded:
    if isinstance(pieces, _Piece):
        return Decoded(batch=batch, images=pieces.images, errors=pieces.errors)
    images, errors, start = [], dict[int, str](), 0
    for piece in (future.result() for future in pieces):
        images.append(piece.images)
        errors |= {start + place: error for place, error in piece.errors.items()}
        start += len(piece.images)
    return Decoded(batch=batch, images=np.concatenate(images), errors=errors)


def _decode_files(files: Sequence[Path] | pa.Array, shape: tuple[int, int], decode: Decode) -> _Piece:
    """Decode files, or the bytes of files."""
    images, errors = np.zeros((len(files), *shape), np.uint8), dict[int, str]()
    sources: Iterable[Any] = files.to_pylist() if isinstance(files, pa.Array) else files
    for place, source in enumerate(sources):
        try:
            if source is None:
                raise UserError("no image")
            images[place] = decode(source if isinstance(source, Path) else io.BytesIO(source))
        except UserError as error:
            errors[place] = str(error)
    return _Piece(images, errors)


def _pixels(column: pa.Array, shape: tuple[int, int]) -> _Piece:
    """Return pixels of lists or of binary of a fixed length."""
    length, images = shape[0] * shape[1], np.zeros((len(column), *shape), np.uint8)
    errors = {int(place): "no image" for place in np.flatnonzero(column.is_null())}
    is_used = np.asarray(column.is_valid())
    if pa.types.is_fixed_size_binary(column.type):
        found = column.drop_null()
        start = found.offset * length
        values = np.frombuffer(found.buffers()[1] or b"", np.uint8)[start : start + len(found) * length]
    else:
        lengths = np.asarray(pc.fill_null(pc.list_value_length(column), length))
        for place in np.flatnonzero(lengths != length):
            errors[int(place)] = f"{lengths[place]} pixels; must have {length}"
        is_used = is_used & (lengths == length)
        flat = column.filter(pa.array(is_used)).flatten()
        if flat.null_count:
            is_partial = np.asarray(flat.is_null()).reshape(-1, length).any(axis=1)
            for place in np.flatnonzero(is_used)[is_partial]:
                errors[int(place)] = "pixels are missing"
            flat = pc.fill_null(flat, 0)
        values = np.asarray(flat)
    images[is_used] = values.reshape(-1, *shape)
    images[[*errors]] = 0
    return _Piece(images, errors)
