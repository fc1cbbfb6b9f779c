"""How much each kept epoch counts, against a sum over the steps one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.gradients.diagnostics import checkpoint_weights


@given(
    st.lists(st.integers(0, 6), min_size=1, unique=True).map(sorted),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_every_step_counts_for_the_epoch_that_lies_nearest(epochs: list[int], steps: int, trained: int) -> None:
    rates = np.random.default_rng(0).uniform(0.1, 1, steps * trained).astype(np.float32)
    expected = dict.fromkeys(epochs, 0.0)
    for step, rate in enumerate(rates):
        place = (step + 0.5) / steps
        expected[min(epochs, key=lambda epoch: abs(place - epoch))] += float(rate)
    found = checkpoint_weights(epochs, rates, steps)
    np.testing.assert_allclose(found, list(expected.values()), rtol=1e-6)
    assert found.sum() == pytest.approx(float(rates.sum()), rel=1e-6)
