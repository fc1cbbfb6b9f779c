"""The gradient noise scale: the batch size at which the noise of a gradient is as large as the gradient.

B = tr(Σ) / ‖G‖², where Σ is the covariance of the per-example gradients and G their mean (McCandlish et al., arXiv
1812.06162, equation 2.9). Much smaller batches give noisy steps; much larger ones hardly improve a step.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.intervals import TAILS

Steps = Float[np.ndarray, " steps"]
Chunks = Float[np.ndarray, " chunks"]


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """Unbiased estimates of tr(Σ) and ‖G‖², and an interval of their ratio."""

    trace: float  # estimate of tr(Σ)
    squared_norm: float  # estimate of ‖G‖²; may be negative if noise dominates
    low: float  # lower end of the 95 % interval of the noise scale, in examples
    high: float  # upper end; infinite if the interval of ‖G‖² includes 0

    @property
    def value(self) -> float:
        """tr(Σ) / ‖G‖², in examples; infinite if the estimate of ‖G‖² is not positive."""
        return _ratio(self.trace, self.squared_norm)


def from_chunks(
    products: Float[np.ndarray, "chunks chunks"],
    squares: Chunks,
    sizes: Int[np.ndarray, " chunks"],
    strata: Int[np.ndarray, " chunks"],
    *,
    samples: int,
    seed: int,
) -> NoiseScale:
    """Estimate the noise scale from a data set in chunks, with an interval by bootstrap over the chunks.

    The mean inner product of two distinct examples' gradients is ‖G‖²; the products of the chunks' sums contain those
    of all pairs.

    Args:
        products: inner products of the chunks' summed gradients, float64.
        squares: sum of the examples' squared gradient norms by chunk, float64.
        sizes: number of examples in each chunk, at least one.
        strata: class of each chunk; the bootstrap resamples chunks within each class, `samples` times.
    """
    rng = np.random.default_rng(seed)
    weights = np.zeros((samples, len(sizes)))
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        weights[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), samples)
    # A chunk that is drawn twice is paired with itself, by the mean product of distinct examples within it
    within = (np.diag(products) - squares) * sizes / np.maximum(sizes - 1, 1)
    pairs = products - np.diag(np.diag(products)) + np.diag(within)
    # `einsum` adds in a fixed order; `@` calls a BLAS, whose order depends on the number of threads
    counts = np.einsum("rk,k->r", weights, sizes)
    squared_norms = np.einsum("rl,rl->r", np.einsum("rk,kl->rl", weights, pairs), weights) / counts**2
    traces = np.einsum("rk,k->r", weights, squares) / counts - squared_norms
    ratios = np.array([_ratio(*pair) for pair in zip(traces, squared_norms, strict=True)])
    low, high = np.quantile(ratios, TAILS, method="nearest")
    total = float(np.sum(sizes))
    squared_norm = float(np.sum(products) - np.sum(squares)) / (total * max(total - 1, 1))
    return NoiseScale(
        trace=float(np.sum(squares)) / total - squared_norm,
        squared_norm=squared_norm,
        low=float(low),
        high=float(high),
    )


def from_two_batch_sizes(
    small_norm: Steps, large_norm: Steps, *, small_size: float, large_size: float
) -> tuple[Steps, Steps]:
    """Return unbiased estimates of tr(Σ) and ‖G‖² for each step, float64 (McCandlish et al., appendix A.1).

    Those of a single step are very noisy: average both over steps before taking their ratio.

    Args:
        small_norm: root mean square of the norms of mean gradients over `small_size` examples each.
        large_norm: norm of the mean gradient over `large_size` examples.
    """
    small, large = (np.square(norm, dtype=np.float64) for norm in (small_norm, large_norm))
    trace = (small - large) / (1 / small_size - 1 / large_size)
    squared_norm = (large_size * large - small_size * small) / (large_size - small_size)
    return trace, squared_norm


def over_training(trace: Steps, squared_norm: Steps, *, windows: int) -> Float[np.ndarray, " parts"]:
    """Return tr(Σ) / ‖G‖² of the means in each of `windows` equal parts of a training; NaN if not positive."""
    parts = [np.array_split(estimates, min(windows, len(estimates))) for estimates in (trace, squared_norm)]
    means = ((float(np.mean(above)), float(np.mean(below))) for above, below in zip(*parts, strict=True))
    return np.array([above / below if below > 0 else np.nan for above, below in means])


def _ratio(trace: float, squared_norm: float) -> float:
    return float(trace / squared_norm) if squared_norm > 0 else np.inf
