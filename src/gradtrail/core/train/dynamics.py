"""How each training example fared from epoch to epoch, as training met it; NumPy on the host."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float, Int

from gradtrail.core.common.batching import PADDING
from gradtrail.core.train.step import RowRecord


class LearningDynamics:
    """Follows every example of a training split through the epochs, each of which visits it once.

    Args:
        num_examples: of the split.

    Attributes:
        epochs: added so far.
        forgetting_events: how often an example was wrong at a visit after it was right at the one before (Toneva et
            al., arXiv 1812.05159), int32.
        first_correct: the first epoch whose visit found it right, from 1; 0 for none yet, int32.
    """

    def __init__(self, num_examples: int):
        self.epochs = 0
        self.forgetting_events: Int[np.ndarray, " examples"] = np.zeros(num_examples, np.int32)
        self.first_correct: Int[np.ndarray, " examples"] = np.zeros(num_examples, np.int32)
        self._was_correct: Bool[np.ndarray, " examples"] = np.zeros(num_examples, bool)
        self._sum: Float[np.ndarray, " examples"] = np.zeros(num_examples)
        self._sum_of_squares: Float[np.ndarray, " examples"] = np.zeros(num_examples)

    def add(self, rows: RowRecord) -> None:
        """Add an epoch; a probability that is not finite, of a step that overflowed, counts as 0."""
        indices = np.asarray(rows.indices).ravel()
        visited = indices != PADDING
        order = indices[visited]
        correct, probability = np.zeros_like(self._was_correct), np.zeros_like(self._sum)
        correct[order] = np.asarray(rows.correct).ravel()[visited]
        probability[order] = np.nan_to_num(np.asarray(rows.probability, np.float64).ravel()[visited])
        self.epochs += 1
        self.forgetting_events += self._was_correct & ~correct
        self.first_correct[correct & (self.first_correct == 0)] = self.epochs
        self._was_correct = correct
        self._sum += probability
        self._sum_of_squares += probability**2

    def as_arrays(self) -> dict[str, np.ndarray]:
        """Return everything as named arrays, of which `from_arrays` makes an equal object."""
        return {
            "epochs": np.array(self.epochs),
            "forgetting_events": self.forgetting_events,
            "first_correct": self.first_correct,
            "was_correct": self._was_correct,
            "sum": self._sum,
            "sum_of_squares": self._sum_of_squares,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "LearningDynamics":
        """Return what `as_arrays` told of."""
        found = cls(len(arrays["sum"]))
        found.epochs = int(arrays["epochs"])
        found.forgetting_events = np.array(arrays["forgetting_events"])
        found.first_correct = np.array(arrays["first_correct"])
        found._was_correct = np.array(arrays["was_correct"])
        found._sum = np.array(arrays["sum"])
        found._sum_of_squares = np.array(arrays["sum_of_squares"])
        return found

    @property
    def mean_probability(self) -> Float[np.ndarray, " examples"]:
        """Mean of the label's probability over the visits, float32 (Swayamdipta et al., arXiv 2009.10795)."""
        return (self._sum / max(1, self.epochs)).astype(np.float32)

    @property
    def probability_std(self) -> Float[np.ndarray, " examples"]:
        """Standard deviation of the same over the visits, float32: their variability."""
        epochs = max(1, self.epochs)
        variance = self._sum_of_squares / epochs - (self._sum / epochs) ** 2
        return np.sqrt(np.maximum(variance, 0)).astype(np.float32)
