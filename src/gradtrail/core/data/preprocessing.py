"""From the raw data set to its splits: validation split, subset, label noise, corrections; NumPy on the host."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Int, Integer, UInt8

from gradtrail.core.common.split import Split
from gradtrail.core.common.validation import POSITIVE_SHARE, SEED, SHARE, check_fields
from gradtrail.core.data.config import AugmentationConfig

_MAX_DEFORMATIONS = 1000  # MNIST8M has 135
Seed: TypeAlias = int | tuple[int, ...]
_SPLIT, _SUBSET, _NOISE = range(3)  # independent streams of random numbers from one seed


def stratified_split(
    labels: Integer[np.ndarray, " examples"], fraction: float, *, seed: Seed
) -> tuple[Int[np.ndarray, " kept"], Int[np.ndarray, " held_out"]]:
    """Split examples at random so that both parts have the same class proportions.

    Args:
        labels: class of each example, 0 or more.
        fraction: share that is held out, in [0, 1).

    Returns:
        Indices that are kept and indices that are held out, both ascending. round(fraction · n) of `n` examples are
        held out, and from each class a number that differs from `fraction` times its size by less than one.
    """
    rng = np.random.default_rng(seed)
    counts = np.bincount(labels)
    quotas = _largest_remainders(counts * fraction, round(fraction * len(labels)))
    held_out = [rng.permutation(np.flatnonzero(labels == label))[:quota] for label, quota in enumerate(quotas)]
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def stratified_subset(labels: Integer[np.ndarray, " examples"], size: int, *, seed: Seed) -> Int[np.ndarray, " size"]:
    """Return ascending indices of `size` random examples with the same class proportions; all if there are fewer."""
    if size >= len(labels):
        return np.arange(len(labels))
    return stratified_split(labels, size / len(labels), seed=seed)[1]


def _largest_remainders(shares: np.ndarray, total: int) -> np.ndarray:
    """Round shares to integers with sum `total`: down, then up for the largest remainders."""
    quotas = np.floor(shares).astype(np.int64)
    neediest = np.argsort(quotas - shares, kind="stable")
    quotas[neediest[: total - quotas.sum()]] += 1
    return quotas


def symmetric_noise(
    labels: Int[np.ndarray, " examples"], rate: float, num_classes: int, *, seed: Seed
) -> Int[np.ndarray, " examples"]:
    """Replace the labels of a random share of the examples, each other class being equally likely.

    Args:
        labels: true class of each example.
        rate: share that is replaced, in [0, 1); exactly round(rate · n) labels differ.
        num_classes: number of classes, at least 2.
        seed: seed of the choice of examples and of their labels.
    """
    rng = np.random.default_rng(seed)
    flipped = rng.permutation(len(labels))[: round(rate * len(labels))]
    shift = rng.integers(1, num_classes, size=len(flipped))
    noisy = labels.copy()
    noisy[flipped] = (labels[flipped] + shift) % num_classes
    return noisy


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """The section `preprocess` of `params.yaml`."""

    seed: int  # seed of the split, the subset and the noise
    validation_fraction: float  # share of the training set that is held out, stratified by class
    subset_fraction: float  # share of every split that is used, for quick runs; 1 for all
    # share of the training labels that are replaced by wrong ones; validation and test are unchanged
    label_noise: float
    # True if labels that people corrected are applied, after the noise; `test` for the test split alone, which has
    # them alongside the given labels
    corrections: Literal[False, True, "test"]
    deformations: int  # number of versions of each training example, itself included; see `deformation.versions_of`
    deformation: AugmentationConfig  # ranges of the deformations, drawn once for each version of an example

    def __post_init__(self) -> None:
        check_fields(
            self,
            seed=SEED,
            validation_fraction=POSITIVE_SHARE,
            subset_fraction={"above": 0, "at_most": 1},
            label_noise=SHARE,
            deformations={"at_least": 1, "at_most": _MAX_DEFORMATIONS},
        )
        if self.deformations > 1 and not self.deformation.enabled:
            raise ValueError(f"deformation must change something where deformations is {self.deformations}; all are 0")


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
        images: uint8 pixels of the training part, in the original order.
        labels: class of each image.
        test_images: uint8 pixels of the test part.
        test_labels: class of each test image.
    """
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
        split: without corrections.
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


def _take(images: np.ndarray, labels: np.ndarray, chosen: np.ndarray, config: PreprocessConfig) -> Split:
    """Return a stratified subset of the `chosen` examples as a split."""
    size = max(1, round(config.subset_fraction * len(chosen)))
    rows = chosen[stratified_subset(labels[chosen], size, seed=(config.seed, _SUBSET))].astype(np.int32)
    chosen_labels = labels[rows].astype(np.int32)
    return Split(
        images=images[rows],
        labels=chosen_labels,
        true_labels=chosen_labels,
        given_labels=chosen_labels,
        corrected_labels=chosen_labels,
        example_id=rows,
    )
