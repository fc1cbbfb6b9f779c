"""Splits of a data set, and how they are made: validation split, subset, label noise, corrections; NumPy on the host.

Imports no JAX, which reading params and whole splits does not need.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Int, Integer, Shaped, UInt8

from gradtrail.core.config import PositiveFraction, PositiveShare, Seed, Share, config

SeedSequence: TypeAlias = int | tuple[int, ...]
_UNEQUAL = 1.5  # times the examples of the smallest class; more in the largest one are unequal classes
REMOVED = -1  # in place of a label: the example is not in the training set
# Independent streams of random numbers of one seed: NumPy's seed s is (s, 0), so no stream has a seed alone
_SPLIT, _SUBSET, _NOISE, TEST_SPLIT, OMITTED = range(5)
_BLOCK = 4096  # images whose pixels are in memory at once


@dataclass(frozen=True, kw_only=True)
class Split:
    """Examples of one split."""

    images: UInt8[np.ndarray, "examples height width *channels"]  # pixels, 0 to 255
    labels: Int[np.ndarray, " examples"]  # class of each example, int32; training and scoring use these
    true_labels: Int[np.ndarray, " examples"]  # class before label noise; without noise, the corrected class
    given_labels: Int[np.ndarray, " examples"]  # class before corrections
    corrected_labels: Int[np.ndarray, " examples"]  # class after corrections; `labels` except in the test split
    example_id: Int[np.ndarray, " examples"]  # position in the original file, int32
    files: Shaped[np.ndarray, " examples"] | None = None  # path of the image file of each example, if it has one

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | np.ndarray) -> "Split":
        return Split(**{name: values[rows] for name, values in vars(self).items() if values is not None})


@config
class PreprocessConfig:
    """The section `preprocess` of `params.yaml`."""

    seed: Seed  # seed of the split, the subset and the noise
    validation_fraction: PositiveShare  # share of the training set that is held out, stratified by class
    subset_fraction: PositiveFraction  # share of every split that is used, for quick runs; 1 for all
    # share of the training labels that are replaced by wrong ones; validation and test are unchanged
    label_noise: Share
    # True if labels that people corrected are applied, after the noise; `test` for the test split alone, which has
    # them alongside the given labels
    corrections: Literal[False, True, "test"]


def channel_statistics(
    images: UInt8[np.ndarray, "examples height width *channels"],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, of pixels in 0..1; of a constant channel 1/255.

    The sums are of integers, so that no processor's order of summation changes a digit.
    """
    num_channels = images.shape[3] if images.ndim == 4 else 1
    sums, squares = np.zeros(num_channels, np.int64), np.zeros(num_channels, np.int64)
    for start in range(0, len(images), _BLOCK):
        pixels = images[start : start + _BLOCK].reshape(-1, num_channels)
        sums += pixels.sum(axis=0, dtype=np.int64)
        squares += np.square(pixels, dtype=np.uint16).sum(axis=0, dtype=np.int64)
    count = images.size // num_channels
    pairs = [(int(total), int(square)) for total, square in zip(sums, squares, strict=True)]
    deviations = (math.sqrt(count * square - total**2) / count for total, square in pairs)
    return tuple(total / count / 255 for total, _ in pairs), tuple(max(1.0, each) / 255 for each in deviations)


def stratified_split(
    labels: Integer[np.ndarray, " examples"], fraction: float, *, seed: SeedSequence, keep: int = 1
) -> tuple[Int[np.ndarray, " kept"], Int[np.ndarray, " held_out"]]:
    """Split examples at random so that both parts have the same class proportions.

    Args:
        fraction: share that is held out, in [0, 1).
        keep: number of examples of each class that are not held out, whatever its share; 0 or 1.

    Returns:
        Ascending indices of both parts. round(fraction · n) of `n` examples are held out, fewer if `keep` leaves no
        others, and from each class a number that differs from `fraction` times its size by at most one.
    """
    rng = np.random.default_rng(seed)
    counts = np.bincount(labels)
    # Quotas are rounded down, then up for the classes with the largest remainders that have an example to spare
    shares = counts * fraction
    quotas = np.minimum(np.floor(shares).astype(np.int64), np.maximum(counts - keep, 0))
    neediest = np.argsort(quotas - shares, kind="stable")
    neediest = neediest[counts[neediest] - quotas[neediest] > keep]
    quotas[neediest[: round(fraction * len(labels)) - quotas.sum()]] += 1
    held_out = [rng.permutation(np.flatnonzero(labels == label))[:quota] for label, quota in enumerate(quotas)]
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def stratified_subset(
    labels: Integer[np.ndarray, " examples"], size: int, *, seed: SeedSequence
) -> Int[np.ndarray, " size"]:
    """Return ascending indices of `size` random examples with the same class proportions; all if there are fewer."""
    if size >= len(labels):
        return np.arange(len(labels))
    return stratified_split(labels, size / len(labels), seed=seed, keep=0)[1]


def class_sizes(labels: Integer[np.ndarray, " examples"]) -> tuple[int, int]:
    """Return the number of examples of the smallest class that has any, and of the largest class."""
    counts = np.bincount(labels)
    return int(counts[counts > 0].min()), int(counts.max())


def are_unequal(labels: Integer[np.ndarray, " examples"]) -> bool:
    """Whether sizes of classes differ so much that accuracy is mostly about the larger ones."""
    smallest, largest = class_sizes(labels)
    return largest > _UNEQUAL * smallest


def symmetric_noise(
    labels: Int[np.ndarray, " examples"], rate: float, num_classes: int, *, seed: SeedSequence
) -> Int[np.ndarray, " examples"]:
    """Replace the labels of a random share of the examples, each other class being equally likely.

    Args:
        rate: share that is replaced, in [0, 1); exactly round(rate · n) labels differ.
    """
    rng = np.random.default_rng(seed)
    flipped = rng.permutation(len(labels))[: round(rate * len(labels))]
    shift = rng.integers(1, num_classes, size=len(flipped))
    noisy = labels.copy()
    noisy[flipped] = (labels[flipped] + shift) % num_classes
    return noisy


def prepare(
    images: UInt8[np.ndarray, "examples height width *channels"],
    labels: UInt8[np.ndarray, " examples"],
    test_images: UInt8[np.ndarray, "tests height width *channels"],
    test_labels: UInt8[np.ndarray, " tests"],
    config: PreprocessConfig,
    *,
    num_classes: int,
) -> dict[str, Split]:
    """Return the splits `train`, `validation` and `test`, without corrections."""
    train_rows, held_out = stratified_split(labels, config.validation_fraction, seed=(config.seed, _SPLIT))
    train = _take(images, labels, train_rows, config)
    noisy = symmetric_noise(train.labels, config.label_noise, num_classes, seed=(config.seed, _NOISE))
    return {
        "train": dataclasses.replace(train, labels=noisy, given_labels=noisy, corrected_labels=noisy),
        "validation": _take(images, labels, held_out, config),
        "test": _take(test_images, test_labels, np.arange(len(test_labels)), config),
    }


def correct(
    split: Split, example_id: Int[np.ndarray, " corrections"], new: Int[np.ndarray, " corrections"], *, is_applied: bool
) -> Split:
    """Return a split with corrections of its given labels.

    A noisy label keeps its true label; for any other label the correction is the truth.

    Args:
        example_id: ids of the corrected examples, without duplicates; those that the split lacks are ignored.
        new: correct label of each of them.
        is_applied: True if `labels` become the corrected ones; False for a test split.
    """
    _, rows, chosen = np.intersect1d(split.example_id, example_id, assume_unique=True, return_indices=True)
    corrected, truth = split.given_labels.copy(), split.true_labels.copy()
    corrected[rows] = new[chosen]
    if is_applied:
        clean = split.given_labels == split.true_labels
        truth[clean] = corrected[clean]
    return dataclasses.replace(
        split, labels=corrected if is_applied else split.labels, true_labels=truth, corrected_labels=corrected
    )


def as_trained(train: Split, example_id: Int[np.ndarray, " changed"], labels: Int[np.ndarray, " changed"]) -> Split:
    """Return a training split with other labels of these examples, as `correct` applies them, without those `REMOVED`.

    Args:
        example_id: ids of the changed examples, without duplicates; those that the split lacks are ignored.
        labels: label of each of them in the training.
    """
    changed = correct(dataclasses.replace(train, given_labels=train.labels), example_id, labels, is_applied=True)
    return changed[changed.labels != REMOVED]


def _take(images: np.ndarray, labels: np.ndarray, chosen: np.ndarray, config: PreprocessConfig) -> Split:
    """Return a stratified subset of the `chosen` examples as a split."""
    size = max(1, round(config.subset_fraction * len(chosen)))
    rows = chosen[stratified_subset(labels[chosen], size, seed=(config.seed, _SUBSET))].astype(np.int32)
    same = dict.fromkeys(("labels", "true_labels", "given_labels", "corrected_labels"), labels[rows].astype(np.int32))
    return Split(images=images[rows], example_id=rows, **same)
