"""Scores of every example of a training split that is too large to analyze as a whole: one pass, written in parts.

Memory holds a part of the split, and the gradient norms of all. Ranks and galleries use the sample.
"""

import contextlib
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gradtrail.core.batching import num_batches
from gradtrail.core.data import Split
from gradtrail.core.gradients.passes import GradientPasses
from gradtrail.core.nn.models import HostParams, Params
from gradtrail.support.progress import progress_bar

NAME = "every_train_example.parquet"
_PART = 2**15  # examples that are scored and written at a time, rounded up to whole batches


def score_every_example(
    passes: GradientPasses, params: Params | HostParams, train: Split, path: Path
) -> dict[str, float]:
    """Write a row for each example to a new parquet file, in the order of the split, with a row group for each part.

    The columns are those of `scores.score_batch`, with the example's id and labels, and `correct`. Return metrics: the
    number of examples, mean, standard deviation and maximum of the gradient norm, and the misclassified share.
    """
    params = jax.device_put(params)
    size = num_batches(_PART, passes.score.batch_size) * passes.score.batch_size
    norms, num_wrong = np.empty(len(train), np.float32), 0
    file: pq.ParquetWriter | None = None
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(progress_bar("gradients of every example", len(train), unit="steps"))
        for start in range(0, len(train), size):
            part = train[start : start + size]
            columns = {"example_id": part.example_id, "label": part.labels, "true_label": part.true_labels}
            columns |= passes.score(params, part.images, part.labels, advance=bar.advance)
            columns["correct"] = columns["predicted"] == columns["label"]
            norms[start : start + size] = columns["grad_norm"]
            num_wrong += int(np.sum(~columns["correct"]))
            table = pa.table(columns)
            file = file or stack.enter_context(pq.ParquetWriter(path, table.schema, use_dictionary=False))
            file.write_table(table)
    return {
        "every_example/examples": len(train),
        "every_example/grad_norm_mean": float(np.mean(norms, dtype=np.float64)),
        "every_example/grad_norm_std": float(np.std(norms, dtype=np.float64)),
        "every_example/grad_norm_max": float(np.max(norms)),
        "every_example/misclassified": num_wrong / len(train),
    }
