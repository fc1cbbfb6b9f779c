"""Splits are disjoint, complete, of the exact size, and fair to every class."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.data.preprocessing import stratified_split, stratified_subset

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=80).map(lambda labels: np.array(labels, np.uint8))
FRACTIONS = st.floats(0, 1, exclude_max=True)


@given(LABELS, FRACTIONS, st.integers(0, 5))
def test_a_split_is_disjoint_complete_and_stratified(labels: np.ndarray, fraction: float, seed: int) -> None:
    kept, held_out = stratified_split(labels, fraction, seed=seed)
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, held_out])), np.arange(len(labels)))
    assert np.all(np.diff(kept) > 0)
    assert np.all(np.diff(held_out) > 0)
    assert len(held_out) == round(fraction * len(labels))
    shares = np.bincount(labels[held_out], minlength=5) - fraction * np.bincount(labels, minlength=5)
    assert np.all(np.abs(shares) < 1 + 1e-9)


@given(LABELS, st.integers(1, 100))
def test_a_subset_has_its_size_and_is_stratified(labels: np.ndarray, size: int) -> None:
    rows = stratified_subset(labels, size, seed=0)
    assert len(rows) == min(size, len(labels))
    assert np.all(np.diff(rows) > 0)
    shares = np.bincount(labels[rows], minlength=5) - len(rows) / len(labels) * np.bincount(labels, minlength=5)
    assert np.all(np.abs(shares) < 1 + 1e-9)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_decides_who_is_held_out(seed: int) -> None:
    labels = np.repeat(np.arange(3), 30)
    first, again = (stratified_split(labels, 0.5, seed=seed)[1] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != stratified_split(labels, 0.5, seed=0)[1])
