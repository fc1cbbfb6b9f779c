"""The linear datamodeling score against SciPy's rank correlation."""

import numpy as np
import pytest
from scipy import stats

from gradtrail.core.gradients.lds import measure_lds


def test_lds_is_the_mean_of_spearmans_correlations() -> None:
    rng = np.random.default_rng(1)
    real = rng.normal(size=(12, 2))
    predicted = real + rng.normal(size=(12, 2)) * [0.1, 2.0]
    by_output, mean = measure_lds(predicted, real)
    assert by_output == pytest.approx(
        [stats.spearmanr(*pair).statistic for pair in zip(predicted.T, real.T, strict=True)]
    )
    assert mean.value == pytest.approx(np.mean(by_output))
    assert mean.low < mean.value < mean.high < 1
    assert mean.high - mean.low > 0.1
