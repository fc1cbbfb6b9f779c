"""Splits, subsets and label noise: complete, stratified, and a function of the seed."""

import numpy as np
from factories import preprocess_config
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.data import Split, channel_statistics, prepare, stratified_split, stratified_subset, symmetric_noise

RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (60, 4, 3), dtype=np.uint8), RNG.integers(0, 3, 60, dtype=np.uint8)
TEST_IMAGES, TEST_LABELS = RNG.integers(0, 256, (20, 4, 3), dtype=np.uint8), RNG.integers(0, 3, 20, dtype=np.uint8)


def splits_of(**overrides: float) -> dict[str, Split]:
    return prepare(IMAGES, LABELS, TEST_IMAGES, TEST_LABELS, preprocess_config(**overrides), num_classes=3)


@given(st.floats(0.05, 0.9), st.floats(0.05, 1), st.floats(0, 0.9), st.integers(0, 3))
def test_every_example_keeps_its_image_and_true_label(
    validation_fraction: float, subset_fraction: float, label_noise: float, seed: int
) -> None:
    splits = splits_of(
        seed=seed,
        validation_fraction=validation_fraction,
        subset_fraction=subset_fraction,
        label_noise=label_noise,
    )
    for name, split in splits.items():
        images, labels = (TEST_IMAGES, TEST_LABELS) if name == "test" else (IMAGES, LABELS)
        np.testing.assert_array_equal(split.images, images[split.example_id])
        np.testing.assert_array_equal(split.true_labels, labels[split.example_id])
        assert np.all(np.diff(split.example_id) > 0)
        assert {array.dtype for array in (split.labels, split.true_labels, split.example_id)} == {np.dtype("int32")}
        wrong = np.sum(split.labels != split.true_labels)
        assert wrong == (round(label_noise * len(split)) if name == "train" else 0)
    assert not set(splits["train"].example_id) & set(splits["validation"].example_id)


def test_channel_statistics_equal_numpy() -> None:
    images = np.random.default_rng(1).integers(0, 256, (5000, 3, 2, 3), dtype=np.uint8)
    images[..., 2] = 77
    for pixels in (images, images[..., 0]):
        mean, deviation = channel_statistics(pixels)
        rows = pixels.reshape(-1, len(mean)) / 255
        np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(deviation, np.maximum(rows.std(axis=0), 1 / 255), rtol=1e-12)


def test_without_a_subset_all_examples_are_used() -> None:
    splits = splits_of()
    assert (len(splits["train"]), len(splits["validation"]), len(splits["test"])) == (45, 15, 20)
    both = np.concatenate([splits["train"].example_id, splits["validation"].example_id])
    np.testing.assert_array_equal(np.sort(both), np.arange(60))


def test_the_test_split_does_not_depend_on_the_seed_and_the_others_do() -> None:
    first, other = splits_of(seed=0), splits_of(seed=1)
    np.testing.assert_array_equal(first["test"].example_id, other["test"].example_id)
    assert not np.array_equal(first["validation"].example_id, other["validation"].example_id)


LABEL_LISTS = st.lists(st.integers(0, 4), min_size=1, max_size=80).map(lambda labels: np.array(labels, np.uint8))
FRACTIONS = st.floats(0, 1, exclude_max=True)


@given(LABEL_LISTS, FRACTIONS, st.integers(0, 5))
def test_a_split_is_disjoint_complete_and_stratified(labels: np.ndarray, fraction: float, seed: int) -> None:
    remaining, held_out = stratified_split(labels, fraction, seed=seed)
    np.testing.assert_array_equal(np.sort(np.concatenate([remaining, held_out])), np.arange(len(labels)))
    assert np.all(np.diff(remaining) > 0)
    assert np.all(np.diff(held_out) > 0)
    assert set(labels[remaining]) == set(labels), "a class keeps its only example"
    counts, taken = (np.bincount(part, minlength=5) for part in (labels, labels[held_out]))
    assert np.all(np.abs(taken - fraction * counts) <= 1 + 1e-9)
    most = np.clip(counts - 1, 0, np.floor(fraction * counts) + 1)
    assert len(held_out) == min(round(fraction * len(labels)), np.sum(most))


@given(LABEL_LISTS, st.integers(1, 100))
def test_a_subset_has_its_size_and_is_stratified(labels: np.ndarray, size: int) -> None:
    rows = stratified_subset(labels, size, seed=0)
    assert len(rows) == min(size, len(labels))
    assert np.all(np.diff(rows) > 0)
    shares = np.bincount(labels[rows], minlength=5) - len(rows) / len(labels) * np.bincount(labels, minlength=5)
    assert np.all(np.abs(shares) < 1 + 1e-9)


@given(
    st.lists(st.integers(0, 3), max_size=60).map(lambda labels: np.array(labels, np.int32)),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 3),
)
def test_noise_changes_exactly_the_given_share(labels: np.ndarray, rate: float, seed: int) -> None:
    before = labels.copy()
    noisy = symmetric_noise(labels, rate, 4, seed=seed)
    assert np.sum(noisy != labels) == round(rate * len(labels))
    assert np.all((noisy >= 0) & (noisy < 4))
    assert noisy.dtype == np.int32
    np.testing.assert_array_equal(labels, before, err_msg="the true labels are left alone")


def test_each_other_class_is_equally_likely() -> None:
    labels = np.full(30_000, 2, np.int32)
    counts = np.bincount(symmetric_noise(labels, 0.5, 4, seed=0), minlength=4)
    assert counts[2] == 15_000
    assert np.all(np.abs(counts[[0, 1, 3]] - 5_000) < 5 * np.sqrt(5_000))
