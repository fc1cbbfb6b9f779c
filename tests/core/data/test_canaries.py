"""Canaries are drawn anew for each seed, are no training examples, and go in by fair coins."""

import dataclasses

import numpy as np
import pytest
from factories import random_split

from gradtrail.core.data.canaries import draw_membership, make_canaries

TRAIN = random_split(50, shape=(20, 10))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_dots_are_in_dark_places_and_differ_between_canaries() -> None:
    dark = dataclasses.replace(TRAIN, images=np.where(np.arange(20)[:, None] < 8, 0, TRAIN.images).astype(np.uint8))
    canaries = make_canaries(dark, "dots", 40, 3, rng=rng())
    assert canaries.images.shape == (40, 20, 10)
    assert set(np.unique(canaries.images)) == {0, 255}
    lit = canaries.images == 255
    assert (lit.sum(axis=(1, 2)) == 10).all()
    assert not lit[:, 8:].any()
    assert len(np.unique(lit.reshape(40, -1), axis=0)) == 40
    assert set(canaries.labels) == {0, 1, 2}


def test_mislabelled_canaries_have_wrong_labels() -> None:
    canaries = make_canaries(TRAIN, "mislabelled", 50, 3, rng=rng())
    assert np.array_equal(canaries.images, TRAIN.images), "all of them, in the split's order"
    assert (canaries.labels != TRAIN.labels).all()
    assert set(canaries.labels) == {0, 1, 2}


def test_coins_are_fair() -> None:
    assert draw_membership(10_000, rng=rng()).mean() == pytest.approx(0.5, abs=4 * 0.005)
