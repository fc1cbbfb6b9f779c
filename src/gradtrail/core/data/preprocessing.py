"""Which examples train and which are held out; NumPy on the host.

Wrong labels on purpose, for the study of mislabelled data; NumPy on the host.

From the raw data set to the splits that later stages read; NumPy on the host.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Int, Integer, UInt8

from gradtrail.core.common.split import Split
from gradtrail.core.common.validation import check

Seed: TypeAlias = int | tuple[int, ...]


def stratified_split(
    labels: Integer[np.ndarray, " examples"], fraction: float, *, seed: Seed
) -> tuple[Int[np.ndarray, " kept"], Int[np.ndarray, " held_out"]]:
    """Split examples so that every class keeps its share in both parts.

    Args:
        labels: class of each example, 0 or more.
        fraction: share that is held out, in [0, 1).
        seed: determines which.

    Returns:
        Indices that are kept and indices that are held out, each ascending. Of `n` examples round(fraction · n) are
        held out; of each class a share that differs from `fraction` by less than one example.
    """
    rng = np.random.default_rng(seed)
    counts = np.bincount(labels)
    quotas = _largest_remainders(counts * fraction, round(fraction * len(labels)))
    held_out = [rng.permutation(np.flatnonzero(labels == label))[:quota] for label, quota in enumerate(quotas)]
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def stratified_subset(labels: Integer[np.ndarray, " examples"], size: int, *, seed: Seed) -> Int[np.ndarray, " size"]:
    """Return ascending indices of `size` examples in which every class keeps its share; all where there are fewer."""
    if size >= len(labels):
        return np.arange(len(labels))
    return stratified_split(labels, size / len(labels), seed=seed)[1]


def _largest_remainders(shares: np.ndarray, total: int) -> np.ndarray:
    """Round shares to whole numbers that add up to `total`: down, then up where most was cut off."""
    quotas = np.floor(shares).astype(np.int64)
    neediest = np.argsort(quotas - shares, kind="stable")
    quotas[neediest[: total - quotas.sum()]] += 1
    return quotas


def symmetric_noise(
    labels: Int[np.ndarray, " examples"], rate: float, num_classes: int, *, seed: int | tuple[int, ...]
) -> Int[np.ndarray, " examples"]:
    """Give a random share of the examples another label, each other class being equally likely.

    Args:
        labels: the true class of each example.
        rate: share that becomes wrong, in [0, 1); exactly round(rate · n) labels differ.
        num_classes: at least 2.
        seed: determines which examples, and their labels.
    """
    rng = np.random.default_rng(seed)
    flipped = rng.permutation(len(labels))[: round(rate * len(labels))]
    shift = rng.integers(1, num_classes, size=len(flipped))
    noisy = labels.copy()
    noisy[flipped] = (labels[flipped] + shift) % num_classes
    return noisy


_SPLIT, _SUBSET, _NOISE = range(3)  # one seed, three streams of random numbers that know nothing of each other


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """The section `preprocess` of `params.yaml`.

    Attributes:
        seed: determines the split, the subset and the noise.
        validation_fraction: share of the training set that is held out, class by class.
        subset_fraction: share of every split that is used, for quick runs; 1 for all.
        label_noise: share of the training labels that are made wrong on purpose; validation and test stay as they are.
    """

    seed: int
    validation_fraction: float
    subset_fraction: float
    label_noise: float

    def __post_init__(self) -> None:
        check("seed", self.seed, at_least=0, below=2**32)
        check("validation_fraction", self.validation_fraction, above=0, below=1)
        check("subset_fraction", self.subset_fraction, above=0, at_most=1)
        check("label_noise", self.label_noise, at_least=0, below=1)


def prepare(
    images: UInt8[np.ndarray, "examples height width"],
    labels: UInt8[np.ndarray, " examples"],
    test_images: UInt8[np.ndarray, "tests height width"],
    test_labels: UInt8[np.ndarray, " tests"],
    config: PreprocessConfig,
    *,
    num_classes: int,
) -> dict[str, Split]:
    """Return the splits `train`, `validation` and `test`.

    Args:
        images: of the data set's training part, in the original order; with `labels`.
        test_images: of its test part; with `test_labels`.
        config: see there.
        num_classes: of the data set.
    """
    kept, held_out = stratified_split(labels, config.validation_fraction, seed=(config.seed, _SPLIT))
    train = _take(images, labels, kept, config)
    noisy = symmetric_noise(train.labels, config.label_noise, num_classes, seed=(config.seed, _NOISE))
    return {
        "train": Split(images=train.images, labels=noisy, true_labels=train.labels, example_id=train.example_id),
        "validation": _take(images, labels, held_out, config),
        "test": _take(test_images, test_labels, np.arange(len(test_labels)), config),
    }


def _take(images: np.ndarray, labels: np.ndarray, chosen: np.ndarray, config: PreprocessConfig) -> Split:
    """Take a stratified subset of the `chosen` examples."""
    size = max(1, round(config.subset_fraction * len(chosen)))
    rows = chosen[stratified_subset(labels[chosen], size, seed=(config.seed, _SUBSET))].astype(np.int32)
    given = labels[rows].astype(np.int32)
    return Split(images=images[rows], labels=given, true_labels=given, example_id=rows)
