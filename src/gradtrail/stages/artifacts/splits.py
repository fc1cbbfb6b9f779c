"""Reading splits, in whole arrays or in shards."""

from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from gradtrail.core.data import Split
from gradtrail.stages.artifacts.shards import ShardedSplit, take_rows
from gradtrail.stages.common import dataset
from gradtrail.stages.common.dataset import SPLITS, DatasetInfo
from gradtrail.support.errors import UserError

SAMPLE = 100_000  # most training examples in what needs all at once: dynamics, tables


class InMemorySource:
    """A split in memory with the interface of `ShardedSplit`."""

    def __init__(self, split: Split):
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    @property
    def example_id(self) -> Int[np.ndarray, " examples"]:
        """Position of each example in the original file."""
        return self._split.example_id

    def read_split(self, start: int, stop: int) -> Split:
        """Return the examples in [start, stop)."""
        return take_rows(self._split, slice(start, stop))

    def read(
        self, start: int, stop: int
    ) -> tuple[UInt8[np.ndarray, "examples height width"], Int[np.ndarray, " examples"]]:
        """Return images and labels of the examples in [start, stop)."""
        return self._split.images[start:stop], self._split.labels[start:stop]


def open_train(
    path: Path, info: DatasetInfo, *, stream_above_mib: float, private: bool
) -> Split | InMemorySource | ShardedSplit:
    """Open the training split for a training.

    Args:
        path: `data/processed/train.npz`.
        info: description of the data set.
        stream_above_mib: size of the images above which a split in shards is read in parts, in MiB.
        private: True if the training is private: it draws each batch from all examples, and counts each example.

    Returns:
        A `Split` for a program that holds all examples on the device, if the split is a file or the training is
        private. Otherwise a source of blocks; both sources yield the same blocks, so that no bit depends on
        `stream_above_mib`.

    Raises:
        UserError: a file is missing or damaged, or a private training cannot be made of the split; one line.
    """
    if private and info.versions > 1:
        raise UserError(
            f"train.privacy.enabled: {path} has {info.versions} versions of each example (preprocess.deformations): "
            f"each would count separately; train.privacy.augmentation_multiplicity counts augmentations as one"
        )
    if not path.is_dir():
        return dataset.read_split(path, info)
    split = ShardedSplit(path, info)
    split.verify()
    mib = split.image_bytes / 2**20
    if mib <= stream_above_mib:
        held = split.read_split()
        return held if private else InMemorySource(held)
    if private:
        raise UserError(
            f"train.privacy.enabled: a private training draws each batch from all examples in memory, but "
            f"runtime.stream_above_mib is {stream_above_mib:g}; the images of {path} take {mib:,.0f} MiB"
        )
    return split


def read_split(path: Path, info: DatasetInfo) -> Split:
    """Read a split as arrays in memory; raise UserError if a file is damaged or does not fit the data set."""
    if not path.is_dir():
        return dataset.read_split(path, info)
    split = ShardedSplit(path, info)
    split.verify()
    return split.read_split()


def open_large(path: Path, info: DatasetInfo) -> InMemorySource | ShardedSplit | None:
    """Open a split of more than `SAMPLE` examples, to read it in parts; None for a smaller one, see `read_sample`."""
    if info.examples[path.stem] <= SAMPLE:
        return None
    return ShardedSplit(path, info) if path.is_dir() else InMemorySource(dataset.read_split(path, info))


def read_sample(path: Path, info: DatasetInfo) -> tuple[Split, Int[np.ndarray, " sample"]]:
    """Read at most `SAMPLE` evenly spaced examples of a split, with their positions in it."""
    if not path.is_dir():
        split = dataset.read_split(path, info)
        rows = sample_rows(len(split))
        return (split if len(rows) == len(split) else take_rows(split, rows)), rows
    sharded = ShardedSplit(path, info)
    sharded.verify()
    rows = sample_rows(len(sharded))
    return sharded.take(rows), rows


def sample_rows(num_examples: int) -> Int[np.ndarray, " sample"]:
    """Return ascending positions of all examples, or of `SAMPLE` evenly spaced ones if there are more."""
    count = min(num_examples, SAMPLE)
    return np.arange(count, dtype=np.int64) * num_examples // max(1, count)


def read_samples(folder: Path, info: DatasetInfo) -> dict[str, Split]:
    """Read all splits of a processed folder; of a large training split a sample, see `read_sample`."""
    paths = {name: folder / f"{name}.npz" for name in SPLITS}
    return {
        name: read_sample(path, info)[0] if name == "train" else read_split(path, info) for name, path in paths.items()
    }


def read_splits(folder: Path, info: DatasetInfo) -> dict[str, Split]:
    """Read all splits of a processed folder."""
    return {name: read_split(folder / f"{name}.npz", info) for name in SPLITS}


def require_undeformed(info: DatasetInfo, stage: str) -> None:
    """Raise UserError if the training split has deformed versions of its examples."""
    if info.versions > 1:
        raise UserError(
            f"{stage}: the training split has {info.versions} versions of each example, which are not "
            f"independent; set preprocess.deformations to 1"
        )
