"""Linear datamodeling score: how well predicted effects of training examples agree with those of retrainings."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.gradients.scores import rank_correlation
from gradtrail.core.intervals import TAILS, Interval


class LDS(NamedTuple):
    """The score over several outputs of a network."""

    by_output: list[float]
    mean: Interval  # by bootstrap over the subsets


def measure_lds(
    predicted: Float[np.ndarray, "subsets outputs"],
    real: Float[np.ndarray, "subsets outputs"],
    resamples: int = 1000,
) -> LDS:
    """Return Spearman's correlation of predicted and real changes over random subsets of the data, and its mean.

    Source: Park et al., "TRAK: Attributing model behavior at scale" (arXiv 2303.14186).
    """

    def correlations(rows: Int[np.ndarray, " subsets"]) -> list[float]:
        return [rank_correlation(predicted[rows, output], real[rows, output]) for output in range(real.shape[1])]

    by_output = correlations(np.arange(len(real)))
    draws = np.random.default_rng(0).integers(len(real), size=(resamples, len(real)))
    low, high = np.quantile([np.mean(correlations(rows)) for rows in draws], TAILS)
    return LDS(by_output, Interval(value=float(np.mean(by_output)), low=float(low), high=float(high)))
