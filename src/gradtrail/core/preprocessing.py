"""From the raw data set to the splits that later stages read; NumPy on the host."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from gradtrail.core.bounds import check
from gradtrail.core.examples import Split
from gradtrail.core.label_noise import symmetric_noise
from gradtrail.core.splits import stratified_split, stratified_subset

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
