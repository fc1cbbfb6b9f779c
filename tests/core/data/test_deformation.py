"""Deformed versions of digits: the first is the digit, every other one a function of its seed, version and example."""

import dataclasses

import numpy as np
import pytest
from factories import random_split

from gradtrail.core.common.split import Split
from gradtrail.core.data import deformation
from gradtrail.core.data.config import AugmentationConfig
from gradtrail.core.data.deformation import versions_of

CONFIG = AugmentationConfig(shift=1.0, rotation=10.0, scale=0.1, shear=5.0, cutout=0)
DIGITS = dataclasses.replace(random_split(6, shape=(8, 8)), example_id=np.array([2, 3, 5, 7, 11, 13], np.int32))


def versions(split: Split = DIGITS, count: int = 3, seed: int = 0, config: AugmentationConfig = CONFIG) -> list[Split]:
    return list(versions_of(split, count, config, seed=seed, num_ids=20))


def test_versions_have_unique_ids_and_the_labels_of_their_source() -> None:
    result = versions()
    assert [part.example_id.tolist() for part in result] == [
        (DIGITS.example_id + 20 * version).tolist() for version in range(3)
    ]
    np.testing.assert_array_equal(result[0].images, DIGITS.images)
    for part in result:
        for name in ("labels", "true_labels", "given_labels", "corrected_labels"):
            np.testing.assert_array_equal(getattr(part, name), getattr(DIGITS, name))
    assert result[1].images.dtype == np.uint8
    assert np.any(result[1].images != DIGITS.images)
    assert np.any(result[1].images != result[2].images)


def test_version_is_a_function_of_its_source_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = versions()
    some = Split(**{field.name: getattr(DIGITS, field.name)[[1, 4]] for field in dataclasses.fields(Split)})
    for version, part in enumerate(versions(some)):
        np.testing.assert_array_equal(part.images, whole[version].images[[1, 4]])
    assert np.any(versions(seed=1)[1].images != whole[1].images)
    monkeypatch.setattr(deformation, "_PART", 4)  # else they are of one part
    cut = versions()
    assert [len(part) for part in cut] == [4, 2] * 3
    np.testing.assert_array_equal(
        np.concatenate([part.images for part in cut]), np.concatenate([p.images for p in whole])
    )
