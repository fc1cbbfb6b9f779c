"""The gradient noise scale: the batch size at which the noise of a gradient is as large as the gradient.

B = tr(Σ) / ‖G‖², Σ the covariance of the gradients of single examples and G their mean (McCandlish et al., arXiv
1812.06162, equation 2.9). Far smaller batches make noisy steps; far larger ones hardly better steps.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

Steps = Float[np.ndarray, " steps"]
Chunks = Float[np.ndarray, " chunks"]


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The noise of the gradients of single examples beside their mean.

    Attributes:
        trace: tr(Σ), unbiased.
        squared_norm: ‖G‖², unbiased, and negative where the noise drowns it.
        low: of the 95 % interval of the noise scale.
        high: likewise; infinite where ‖G‖² may be 0.
    """

    trace: float
    squared_norm: float
    low: float
    high: float

    @property
    def value(self) -> float:
        """tr(Σ) / ‖G‖², in examples; infinite where ‖G‖² is drowned."""
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

    Every pair of distinct examples has an inner product whose mean is ‖G‖²; the sums over chunks hold all of them.

    Args:
        products: inner products of the chunks' summed gradients, float64.
        squares: sum over each chunk's examples of their gradients' squared norms.
        sizes: examples in each chunk, at least one.
        strata: class of each chunk; chunks are drawn anew within their class, as many as there are.
        samples: of the bootstrap.
        seed: of the bootstrap.
    """
    rng = np.random.default_rng(seed)
    weights = np.zeros((samples, len(sizes)))
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        weights[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), samples)
    # A chunk that is drawn twice meets itself: its examples are then paired with others of the chunk, as elsewhere
    within = (np.diag(products) - squares) * sizes / np.maximum(sizes - 1, 1)
    pairs = products - np.diag(np.diag(products)) + np.diag(within)
    counts = weights @ sizes
    squared_norms = np.einsum("rk,rk->r", weights @ pairs, weights) / counts**2
    traces = weights @ squares / counts - squared_norms
    ratios = np.array([_ratio(*pair) for pair in zip(traces, squared_norms, strict=True)])
    low, high = np.quantile(ratios, [0.025, 0.975], method="nearest")
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
    """Return unbiased estimates of tr(Σ) and of ‖G‖² for each step (McCandlish et al., appendix A.1, float64).

    Each by itself is very noisy: average both over steps before taking their ratio.

    Args:
        small_norm: root mean square of the norms of mean gradients of `small_size` examples.
        large_norm: norm of a mean gradient of `large_size` examples.
        small_size: examples behind each of the small ones.
        large_size: examples behind the large one.
    """
    small, large = (np.square(norm, dtype=np.float64) for norm in (small_norm, large_norm))
    trace = (small - large) / (1 / small_size - 1 / large_size)
    squared_norm = (large_size * large - small_size * small) / (large_size - small_size)
    return trace, squared_norm


def over_training(trace: Steps, squared_norm: Steps, *, windows: int) -> Float[np.ndarray, " parts"]:
    """Return tr(Σ) / ‖G‖² in each of `windows` equal parts of a training, of the means of both in that part.

    A part whose ‖G‖² is drowned by noise, its estimate not positive, is NaN.
    """
    means = [
        [float(np.mean(part)) for part in np.array_split(estimates, min(windows, len(estimates)))]
        for estimates in (trace, squared_norm)
    ]
    return np.array([above / below if below > 0 else np.nan for above, below in zip(*means, strict=True)])


def _ratio(trace: float, squared_norm: float) -> float:
    return float(trace / squared_norm) if squared_norm > 0 else np.inf
