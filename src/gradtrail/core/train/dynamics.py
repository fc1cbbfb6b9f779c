"""Learning dynamics: statistics of training examples over the visits of all epochs; NumPy on the host."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float, Int

from gradtrail.core.batching import PADDING
from gradtrail.core.train.gradient import RowRecord


class LearningDynamics:
    """Statistics of all or of sampled examples of a training split; each epoch visits each example once.

    In a private training an epoch may leave examples out, or visit them again: the last visit of an epoch counts.

    Args:
        num_examples: number of examples with statistics.

    Attributes:
        epochs: number of epochs added.
        forgetting_events: number of misclassified visits right after a correct one, int32 (Toneva et al., arXiv
            1812.05159).
        first_correct: first epoch that classified the example correctly, from 1; 0 for none yet, int32.
    """

    def __init__(self, num_examples: int):
        self.epochs = 0
        self.forgetting_events: Int[np.ndarray, " examples"] = np.zeros(num_examples, np.int32)
        self.first_correct: Int[np.ndarray, " examples"] = np.zeros(num_examples, np.int32)
        self._was_correct: Bool[np.ndarray, " examples"] = np.zeros(num_examples, bool)
        self._visits: Int[np.ndarray, " examples"] = np.zeros(num_examples, np.int32)
        self._sum: Float[np.ndarray, " examples"] = np.zeros(num_examples)
        self._sum_of_squares: Float[np.ndarray, " examples"] = np.zeros(num_examples)

    def add(self, rows: RowRecord) -> None:
        """Add an epoch; a probability that is not finite, after an overflow, counts as 0."""
        indices = np.asarray(rows.indices).ravel()
        visited = indices != PADDING
        order = indices[visited]
        correct, probability = self._was_correct.copy(), np.zeros_like(self._sum)
        correct[order] = np.asarray(rows.correct).ravel()[visited]
        probability[order] = np.nan_to_num(np.asarray(rows.probability, np.float64).ravel()[visited])
        self.epochs += 1
        self._visits[order] += 1
        self.forgetting_events += self._was_correct & ~correct
        self.first_correct[correct & (self.first_correct == 0)] = self.epochs
        self._was_correct = correct
        self._sum += probability
        self._sum_of_squares += probability**2

    def as_arrays(self) -> dict[str, np.ndarray]:
        """Return the state as named arrays, for `from_arrays`."""
        return {
            "epochs": np.array(self.epochs),
            "forgetting_events": self.forgetting_events,
            "first_correct": self.first_correct,
            "was_correct": self._was_correct,
            "visits": self._visits,
            "sum": self._sum,
            "sum_of_squares": self._sum_of_squares,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "LearningDynamics":
        """Return the object that `as_arrays` described."""
        dynamics = cls(len(arrays["sum"]))
        dynamics.epochs = int(arrays["epochs"])
        dynamics.forgetting_events = np.array(arrays["forgetting_events"])
        dynamics.first_correct = np.array(arrays["first_correct"])
        dynamics._was_correct = np.array(arrays["was_correct"])
        dynamics._visits = np.array(arrays["visits"])
        dynamics._sum = np.array(arrays["sum"])
        dynamics._sum_of_squares = np.array(arrays["sum_of_squares"])
        return dynamics

    @property
    def mean_probability(self) -> Float[np.ndarray, " examples"]:
        """Mean probability of the label over the visits, float32 (Swayamdipta et al., arXiv 2009.10795)."""
        return (self._sum / np.maximum(1, self._visits)).astype(np.float32)

    @property
    def probability_std(self) -> Float[np.ndarray, " examples"]:
        """Standard deviation of the label's probability over the visits, float32: the variability of the same paper."""
        visits = np.maximum(1, self._visits)
        variance = self._sum_of_squares / visits - (self._sum / visits) ** 2
        return np.sqrt(np.maximum(variance, 0)).astype(np.float32)
