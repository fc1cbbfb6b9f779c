"""From raw data to splits: nobody lost, nobody twice, noise in the training labels alone."""

import numpy as np
import pytest
from factories import preprocess_config
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.common.split import Split
from gradtrail.core.data.preprocessing import prepare

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


def test_without_a_subset_nobody_is_lost() -> None:
    splits = splits_of()
    assert (len(splits["train"]), len(splits["validation"]), len(splits["test"])) == (45, 15, 20)
    both = np.concatenate([splits["train"].example_id, splits["validation"].example_id])
    np.testing.assert_array_equal(np.sort(both), np.arange(60))


def test_noise_changes_labels_and_nothing_else() -> None:
    clean, noisy = splits_of()["train"], splits_of(label_noise=0.4)["train"]
    np.testing.assert_array_equal(clean.images, noisy.images)
    np.testing.assert_array_equal(clean.true_labels, noisy.true_labels)
    assert np.sum(clean.labels != noisy.labels) == 18


def test_the_test_split_does_not_depend_on_the_seed_and_the_others_do() -> None:
    first, other = splits_of(seed=0), splits_of(seed=1)
    np.testing.assert_array_equal(first["test"].example_id, other["test"].example_id)
    assert not np.array_equal(first["validation"].example_id, other["validation"].example_id)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("validation_fraction", 0.0),
        ("validation_fraction", 1.0),
        ("subset_fraction", 0.0),
        ("label_noise", 1.0),
    ],
)
def test_values_out_of_range_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be "):
        splits_of(**{key: value})
