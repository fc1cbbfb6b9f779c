"""The gradient noise scale: the batch size at which the noise of a gradient is as large as the gradient.

B = tr(Σ) / ‖G‖², Σ the covariance of the gradients of single examples and G their mean (McCandlish et al., arXiv
1812.06162, equation 2.9). Far smaller batches make noisy steps; far larger ones hardly better steps.
"""

import numpy as np
from jaxtyping import Float

Steps = Float[np.ndarray, " steps"]


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


def over_training(trace: Steps, squared_norm: Steps, *, windows: int) -> Steps:
    """Return tr(Σ) / ‖G‖² in each of `windows` equal parts of a training, of the means of both in that part.

    A part whose ‖G‖² is drowned by noise, its estimate not positive, is NaN.
    """
    means = [
        [float(np.mean(part)) for part in np.array_split(estimates, min(windows, len(estimates)))]
        for estimates in (trace, squared_norm)
    ]
    return np.array([above / below if below > 0 else np.nan for above, below in zip(*means, strict=True)])
