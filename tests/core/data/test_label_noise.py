"""Noise makes exactly as many labels wrong as it says, each other class being equally likely."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.data.preprocessing import symmetric_noise


@given(
    st.lists(st.integers(0, 3), max_size=60).map(lambda labels: np.array(labels, np.int32)),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 3),
)
def test_exactly_the_asked_share_is_wrong(labels: np.ndarray, rate: float, seed: int) -> None:
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


def test_the_seed_decides() -> None:
    labels = np.zeros(50, np.int32)
    first, again, other = (symmetric_noise(labels, 0.5, 10, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
