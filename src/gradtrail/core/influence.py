"""Which training examples moved the loss of an example, by the inner products of their gradients.

A step on example z with learning rate η lowers the loss of z' by about η ⟨∇ℓ(z), ∇ℓ(z')⟩; TracIn sums this over a
training, and takes kept weights in place of all (Pruthi et al., arXiv 2002.08484, equation 1 and section 3.2). It is
derived for plain gradient descent; other optimizers rescale the steps.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


def checkpoint_weights(
    epochs: Sequence[int], learning_rates: Float[np.ndarray, " steps"], steps_per_epoch: int
) -> Float[np.ndarray, " checkpoints"]:
    """Return how much each kept epoch counts: the sum of the learning rates of the steps that lie nearest to it.

    Args:
        epochs: of the kept weights, ascending; 0 is before training.
        learning_rates: of every step of the training.
        steps_per_epoch: as many went into each epoch.
    """
    after = (np.arange(len(learning_rates)) + 0.5) / steps_per_epoch  # where a step lies, in epochs
    nearest = np.argmin(np.abs(after[:, None] - np.asarray(epochs, float)[None]), axis=1)
    return np.bincount(nearest, weights=learning_rates.astype(np.float64), minlength=len(epochs))
