"""Writing the splits: the training split with its deformed versions, in whole arrays or in shards."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from gradtrail.core.data import PreprocessConfig, Split
from gradtrail.stages.artifacts.shards import join, write_shards
from gradtrail.stages.common.dataset import DatasetInfo, measure_splits, write_processed


def write(
    folder: Path,
    splits: Mapping[str, Split],
    info: DatasetInfo,
    config: PreprocessConfig,
    *,
    num_ids: int,
    advance: Callable[[int], object] = lambda _: None,
) -> dict[str, float]:
    """Write `data/processed` to a new folder, and return the metrics of the splits, see `dataset.measure_splits`.

    In shards the versions of the training split are made, measured and written one part after the other.

    Args:
        folder: the new folder.
        splits: the training split without its deformed versions.
        info: description of the raw data.
        config: the section `preprocess`: number of versions, and form of the files.
        num_ids: number of examples in the original file of the training split.
        advance: function that is called with the number of examples of each part.
    """
    train = splits["train"]
    versions: Iterable[Split] = [train]
    if config.deformations == 1:
        advance(len(train))
    else:
        from gradtrail.core.augmentation import versions_of  # imports JAX, which a single version does not need

        versions = versions_of(
            train, config.deformations, config.deformation, seed=config.seed, num_ids=num_ids, advance=advance
        )
    shard_mib = config.shard_mib
    if shard_mib is None:
        splits = {**splits, "train": join(versions)}
        write_processed(folder, splits, info, versions=config.deformations)
        return measure_splits(splits)
    parts = _Measured(versions)
    write_processed(
        folder,
        splits,
        info,
        write_train=lambda path: write_shards(path, parts, shard_mib),
        versions=config.deformations,
    )
    return measure_splits(splits) | parts.metrics()


class _Measured:
    """Metrics over the parts of a split: integer sums, independent of how it is divided."""

    def __init__(self, parts: Iterable[Split]):
        self._parts = parts
        self._counts = {"train_examples": 0, "noisy_labels": 0, "train_corrected_labels": 0}
        self._pixels = self._sum = self._squares = 0

    def __iter__(self) -> Iterator[Split]:
        for part in self._parts:
            self._counts["train_examples"] += len(part)
            self._counts["noisy_labels"] += int(np.sum(part.labels != part.true_labels))
            self._counts["train_corrected_labels"] += int(np.sum(part.corrected_labels != part.given_labels))
            by_value = np.bincount(part.images.ravel(), minlength=256).tolist()
            self._pixels += sum(by_value)
            self._sum += sum(value * count for value, count in enumerate(by_value))
            self._squares += sum(value**2 * count for value, count in enumerate(by_value))
            yield part

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the parts so far."""
        variance = (self._pixels * self._squares - self._sum**2) / self._pixels**2
        return {**self._counts, "pixel_mean": self._sum / self._pixels / 255, "pixel_std": variance**0.5 / 255}
