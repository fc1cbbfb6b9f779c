"""Learning dynamics against a walk through the visits of each example, one by one."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gradtrail.core.common.batching import PADDING
from gradtrail.core.train.dynamics import LearningDynamics
from gradtrail.core.train.step import RowRecord


def rows(order: np.ndarray, probability: np.ndarray, correct: np.ndarray) -> RowRecord:
    """The records of an epoch that visits examples in `order`, in batches of 3."""
    fill = -len(order) % 3
    indices = np.pad(order, (0, fill), constant_values=PADDING)
    visited = [np.pad(column[order], (0, fill), constant_values=1) for column in (probability, correct)]
    return RowRecord(
        indices=indices.reshape(-1, 3).astype(np.int32),
        probability=visited[0].reshape(-1, 3).astype(np.float32),
        correct=visited[1].reshape(-1, 3).astype(bool),
    )


@given(
    arrays.arrays(bool, st.tuples(st.integers(1, 6), st.just(7))),
    st.randoms(use_true_random=False),
)
def test_dynamics_equal_a_walk_through_the_visits(correct: np.ndarray, random: np.random.Generator) -> None:
    epochs, num_examples = correct.shape
    probability = np.array([[random.random() for _ in range(num_examples)] for _ in range(epochs)], np.float32)
    dynamics = LearningDynamics(num_examples)
    for epoch in range(epochs):
        order = list(range(num_examples))
        random.shuffle(order)
        dynamics.add(rows(np.array(order), probability[epoch], correct[epoch]))
    for example in range(num_examples):
        visits = correct[:, example].tolist()
        forgotten = sum(before and not after for before, after in itertools.pairwise(visits))
        assert dynamics.forgetting_events[example] == forgotten
        assert dynamics.first_correct[example] == (visits.index(True) + 1 if any(visits) else 0)
    np.testing.assert_allclose(dynamics.mean_probability, probability.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(dynamics.probability_std, probability.std(axis=0), rtol=1e-3, atol=1e-5)


def test_a_probability_that_overflowed_counts_as_none() -> None:
    dynamics = LearningDynamics(3)
    dynamics.add(rows(np.arange(3), np.array([np.nan, 0.5, 1.0]), np.array([False, True, True])))
    np.testing.assert_array_equal(dynamics.mean_probability, np.array([0.0, 0.5, 1.0], np.float32))


def test_an_epoch_that_leaves_examples_out_counts_the_visits_and_of_two_the_last() -> None:
    dynamics = LearningDynamics(3)
    dynamics.add(rows(np.array([0, 1]), np.array([0.5, 0.25, 0.0]), np.array([True, False, False])))
    dynamics.add(
        RowRecord(
            indices=np.array([[1, PADDING], [1, PADDING]], np.int32),
            probability=np.array([[0.125, 1.0], [0.75, 1.0]], np.float32),
            correct=np.array([[False, True], [True, True]]),
        )
    )
    np.testing.assert_array_equal(dynamics.mean_probability, np.array([0.5, 0.5, 0.0], np.float32))
    assert dynamics.first_correct.tolist() == [1, 2, 0]
    assert dynamics.forgetting_events.tolist() == [0, 0, 0], "who is not visited forgets nothing"
