"""How fast Grain gives the batches of an epoch in this project's order, beside the blocks of `core.train.feed`.

    python -m benchmarks.streaming_grain [--examples 20000] [--batch-size 128]

Runs where Grain 0.2 is installed; no lock has it. Images and labels are arrays in memory, so no disk is measured: a
data source of single examples in the order of the epoch, batched by Grain, in its threads. Prints one line of JSON with
processor seconds for a million of examples; a training of the default network takes about 20.
"""

import argparse
import functools
import json
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from gradtrail.core.batching import PADDING, Order, num_batches, shuffled_window
from gradtrail.core.data import Split
from gradtrail.core.sharding import make_mesh
from gradtrail.core.train import feed

SHAPE = (28, 28)


class Records:
    """Single examples in the order of an epoch, as a Grain data source."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, order: np.ndarray):
        self._images, self._labels, self._order = images, labels, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: Any) -> dict[str, np.ndarray]:
        example = self._order[position]
        return {"image": self._images[example], "label": self._labels[example]}


def spent(batches: Iterable[Any], examples: int) -> float:
    """Return the processor seconds for a million examples of going through all batches."""
    started = time.process_time()
    for batch in batches:
        jax.block_until_ready(jax.tree.leaves(batch))
    return 1e6 * (time.process_time() - started) / examples


def main() -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")
    import grain

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    count, size = options.examples, options.batch_size
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (count, *SHAPE), np.uint8), rng.integers(0, 10, count, np.int32)
    draw = jax.jit(functools.partial(shuffled_window, count, key=jax.random.key(0)))
    order = Order(count, size, draw).batches(0, num_batches(count, size))
    mesh = make_mesh(jax.devices()[:1])
    ids = np.arange(count, dtype=np.int32)
    split = Split(
        images=images, labels=labels, true_labels=labels, given_labels=labels, corrected_labels=labels, example_id=ids
    )

    def blocks() -> Iterator[Any]:
        steps = feed.steps_in_block(size, SHAPE, len(order))
        in_parts = Order(count, size, draw)
        for block in feed.blocks(split, in_parts, mesh, steps_per_block=steps, first=0):
            yield block.examples.images, block.examples.labels

    records = grain.MapDataset.source(Records(images, labels, order[order != PADDING]))
    found = {"blocks of feed": spent(blocks(), count)}
    for threads in (1, 16):
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=512)
        found[f"Grain, threads: {threads}"] = spent(records.to_iter_dataset(options).batch(size), count)
    found["blocks of feed, again"] = spent(blocks(), count)
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    main()
