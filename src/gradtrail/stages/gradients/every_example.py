"""Scores of every example of a training split that is too large to analyze as a whole: one pass, written in parts.

Memory holds parts of the split, never a table of it. Ranks and galleries, which need all examples, use the sample.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gradtrail.core.batching import overlapped
from gradtrail.core.data import Split
from gradtrail.core.gradients.passes import GradientPasses
from gradtrail.core.nn.models import HostParams, Params
from gradtrail.support.progress import progress_bar

NAME = "every_train_example.parquet"
_PART = 2**15  # examples that are read, scored and written at a time, rounded up to whole batches


def score_large(
    passes: GradientPasses, params: Params | HostParams, train: Split, num_analyzed: int, folder: Path
) -> dict[str, float]:
    """Score every example of a split of which a sample is analyzed, with a progress bar; see `score_every_example`."""
    if not 0 < num_analyzed < len(train):
        return {}
    with progress_bar("gradients of every example", len(train), unit="steps") as bar:
        return score_every_example(passes, params, train, folder / NAME, advance=bar.advance)


def score_every_example(
    passes: GradientPasses,
    params: Params | HostParams,
    train: Split,
    path: Path,
    *,
    advance: Callable[..., object] = lambda *_, **__: None,
) -> dict[str, float]:
    """Write a row for each example to a new parquet file, in the order of the split, with a row group for each part.

    The columns are those of `scores.score_batch`, with the example's id and labels, and `correct`. Return metrics: the
    number of examples, mean, standard deviation and maximum of the gradient norm, and the misclassified share.
    """
    placed = passes.place(params)
    norms, squares, largest, wrong = 0.0, 0.0, 0.0, 0
    size = -(-_PART // passes.score.batch_size) * passes.score.batch_size
    file: pq.ParquetWriter | None = None
    written: Future[None] | None = None
    with ThreadPoolExecutor(2) as pool:  # while a part is scored, the next one is read and the previous one is written
        starts = range(0, len(train), size)
        reads = (pool.submit(train.__getitem__, slice(start, start + size)) for start in starts)
        for read in overlapped(reads):
            part = read.result()
            columns = {"example_id": part.example_id, "label": part.labels, "true_label": part.true_labels}
            columns |= passes.score(placed, part.images, part.labels, advance=advance)
            columns["correct"] = columns["predicted"] == columns["label"]
            norms += float(np.sum(columns["grad_norm"], dtype=np.float64))
            squares += float(np.sum(np.square(columns["grad_norm"], dtype=np.float64)))
            largest = max(largest, float(np.max(columns["grad_norm"])))
            wrong += int(np.sum(~columns["correct"]))
            table = pa.table(columns)
            file = file or pq.ParquetWriter(path, table.schema, use_dictionary=False)  # floats have none
            if written:
                written.result()
            written = pool.submit(file.write_table, table)
        if file and written:
            written.result()
            file.close()
    mean = norms / len(train)
    return {
        "every_example/examples": len(train),
        "every_example/grad_norm_mean": mean,
        "every_example/grad_norm_std": max(0.0, squares / len(train) - mean**2) ** 0.5,
        "every_example/grad_norm_max": largest,
        "every_example/misclassified": wrong / len(train),
    }
