"""Decodes batches of image files into arrays, by several threads ahead of the model."""

import functools
import io
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from gradtrail.serving.predict.images import decode_image
from gradtrail.serving.predict.sources import Batch
from gradtrail.stages.datasets import Framing
from gradtrail.support.errors import UserError
from gradtrail.support.running_time import allowed_cores

_AHEAD = 3  # batches that are decoded or being decoded while the model computes
_PIECE = 32  # images that a thread decodes at a time

_Piece = list[UInt8[np.ndarray, "height width"] | str]  # an image, or the reason why it cannot be used


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A batch as the model takes it."""

    batch: Batch
    images: UInt8[np.ndarray, "images height width"]  # black in place of an image that cannot be used
    errors: dict[int, str]  # why an image cannot be used, by its index in the batch; one line


def decode_batches(batches: Iterable[Batch], shape: tuple[int, int], framing: Framing | None) -> Iterator[Decoded]:
    """Decode batches in their order, a few of them ahead."""
    decode = functools.partial(_decode, shape=shape, framing=framing)
    queue: deque[tuple[Batch, list[Future[_Piece]]]] = deque()
    with ThreadPoolExecutor(allowed_cores(), "decode") as pool:
        for batch in batches:
            starts = range(0, len(batch.images), _PIECE)
            queue.append((batch, [pool.submit(decode, batch.images[start : start + _PIECE]) for start in starts]))
            if len(queue) > _AHEAD:
                yield _join(*queue.popleft(), shape)
        while queue:
            yield _join(*queue.popleft(), shape)


def _decode(files: Sequence[Path | bytes | None], shape: tuple[int, int], framing: Framing | None) -> _Piece:
    results: _Piece = []
    for file in files:
        try:
            if file is None:
                raise UserError("no image")
            results.append(decode_image(file if isinstance(file, Path) else io.BytesIO(file), shape, framing))
        except UserError as error:
            results.append(str(error))
    return results


def _join(batch: Batch, pieces: Iterable[Future[_Piece]], shape: tuple[int, int]) -> Decoded:
    images, errors = np.zeros((len(batch.images), *shape), np.uint8), dict[int, str]()
    for index, result in enumerate(result for piece in pieces for result in piece.result()):
        if isinstance(result, str):
            errors[index] = result
        else:
            images[index] = result
    return Decoded(batch=batch, images=images, errors=errors)
