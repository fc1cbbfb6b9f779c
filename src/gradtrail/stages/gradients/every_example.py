"""Scores of every example of a training split that is otherwise analysed by a sample: one pass, written in parts.

Memory holds parts of the split, never a table of it. Ranks and galleries, which need all examples, use the sample.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gradtrail.core.data import Split
from gradtrail.core.gradients.passes import GradientPasses
from gradtrail.core.nn.models import HostParams, Params

NAME = "every_train_example.parquet"
_PART = 2**15  # examples that are read, scored and written at a time, rounded up to whole batches
_LABELS = ("example_id", "label", "true_label")


class Parts(Protocol):
    """A split whose examples are read in parts."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def read_split(self, start: int, stop: int) -> Split:
        """Return the examples in [start, stop)."""


def score_every_example(
    passes: GradientPasses,
    params: Params | HostParams,
    train: Parts,
    path: Path,
    *,
    advance: Callable[..., object] = lambda *_, **__: None,
) -> dict[str, float]:
    """Score all examples in the order of the split, and write a row for each to a parquet file.

    The columns are those of `scores.score_batch`, with the example's id and labels, and `correct`.

    Args:
        passes: compiled functions of the model.
        params: parameters of the model.
        train: the split.
        path: path of the new file, with a row group for each part.
        advance: function that is called with the number of examples of each batch.

    Returns:
        Metrics: number of examples, mean and maximum of the gradient norm, and the misclassified share.
    """
    placed = passes.place(params)
    norms, squares, largest, wrong = 0.0, 0.0, 0.0, 0
    size = -(-_PART // passes.score.batch_size) * passes.score.batch_size
    with _Writer(path) as writer:
        for part in _ahead(train, size):
            columns = _identity(part) | passes.score(placed, part.images, part.labels, advance=advance)
            columns["correct"] = columns["predicted"] == columns["label"]
            writer.add(columns)
            norms += float(np.sum(columns["grad_norm"], dtype=np.float64))
            squares += float(np.sum(np.square(columns["grad_norm"], dtype=np.float64)))
            largest = max(largest, float(np.max(columns["grad_norm"])))
            wrong += int(np.sum(~columns["correct"]))
    mean = norms / len(train)
    return {
        "every_example/examples": len(train),
        "every_example/grad_norm_mean": mean,
        "every_example/grad_norm_std": max(0.0, squares / len(train) - mean**2) ** 0.5,
        "every_example/grad_norm_max": largest,
        "every_example/misclassified": wrong / len(train),
    }


def summarize(metrics: Mapping[str, float], sample: int) -> str:
    """Return a paragraph for the summary; empty if the analysis is of all examples."""
    if not metrics:
        return ""
    return (
        f"The training split has {metrics['every_example/examples']:,.0f} examples. What follows is of {sample:,} of "
        f"them, evenly spaced; the scores of all are in `{NAME}`: their mean gradient norm is "
        f"{metrics['every_example/grad_norm_mean']:.3g}, the largest {metrics['every_example/grad_norm_max']:.3g}, and "
        f"{metrics['every_example/misclassified']:.2%} of them are misclassified."
    )


def _identity(part: Split) -> dict[str, np.ndarray]:
    columns = (part.example_id, part.labels, part.true_labels)
    return dict(zip(_LABELS, columns, strict=True))


def _ahead(train: Parts, size: int) -> Iterator[Split]:
    """Yield a split in parts; the next one is read in the background."""
    waiting: collections.deque[Future[Split]] = collections.deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="read")
    try:
        for start in range(0, len(train), size):
            waiting.append(pool.submit(train.read_split, start, min(start + size, len(train))))
            if len(waiting) > 1:
                yield waiting.popleft().result()
        yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Writer:
    """Writes row groups of a parquet file in a thread, one after the other; at most one waits."""

    def __init__(self, path: Path):
        self._path = path
        self._file: Any = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._last: Future[None] | None = None

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait()
        finally:
            self._pool.shutdown()
            if self._file is not None:
                self._file.close()

    def add(self, columns: dict[str, np.ndarray]) -> None:
        """Write a row group; raise the error of the previous one."""
        self._wait()
        self._last = self._pool.submit(self._write, columns)

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _write(self, columns: dict[str, np.ndarray]) -> None:
        table = pa.table(columns)
        if self._file is None:
            self._file = pq.ParquetWriter(self._path, table.schema, use_dictionary=False)  # floats have none
        self._file.write_table(table)
