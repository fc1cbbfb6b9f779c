"""A history keeps copies and the first of equal best epochs; dynamics equal a walk through the visits."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import make_engine, random_split, seed_keys, train_config
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gradtrail.core.batching import PADDING
from gradtrail.core.nn.models import HostParams
from gradtrail.core.train.history import History, LearningDynamics, on_host
from gradtrail.core.train.step import RowRecord, StepRecord

ACCURACIES = [0.5, 0.75, 0.75, 0.25]
compiled = functools.partial(make_engine, train_config(epochs=4), random_split(10))


def kernel(params: dict) -> np.ndarray:
    return np.asarray(params["layers"][0]["kernel"])


@pytest.fixture(scope="module")
def run() -> tuple[History, list[np.ndarray]]:
    """A history of four epochs, and the first kernel after each, 0 being the initial one."""
    engine, examples = compiled()
    state = engine.init(seed_keys(0))
    history, kernels = History((0, 1, 3, 9), on_host(state.params), 10), [kernel(state.params).copy()]
    for chunk in engine.train(state, examples, steps_per_call=1):
        if chunk.ends_epoch:
            params = on_host(chunk.state.params)
            history.add(chunk, params, {"loss": 1.0, "accuracy": ACCURACIES[chunk.epoch - 1]})
            kernels.append(kernel(chunk.state.params).copy())
    return history, kernels


def test_kept_best_and_final_weights_are_those_of_their_epochs(run: tuple[History, list[np.ndarray]]) -> None:
    history, kernels = run
    assert [remaining.epoch for remaining in history.kept] == [0, 1, 3]
    assert (history.best.epoch, history.final.epoch) == (2, 4)
    for weights in (*history.kept, history.best, history.final):
        np.testing.assert_array_equal(kernel(weights.params), kernels[weights.epoch])


def test_a_copy_on_the_host_shares_no_memory_with_the_device() -> None:
    state = compiled()[0].init(seed_keys(0))
    copied = on_host(state.params)
    assert not np.shares_memory(kernel(copied), np.asarray(kernel(state.params)))
    assert all(leaf.flags.writeable for leaf in jax.tree.leaves(copied)), "a view of the device is not"


def test_records_are_means_over_the_steps_of_their_epoch(run: tuple[History, list[np.ndarray]]) -> None:
    history, _ = run
    assert [epoch["epoch"] for epoch in history.epochs] == [1, 2, 3, 4]
    for epoch, steps in zip(history.epochs, history.steps, strict=True):
        assert steps["loss"].shape == (3,)
        for name in ("loss", "cross_entropy", "accuracy"):
            assert epoch[name] == pytest.approx(float(np.mean(steps[name])))
    assert [epoch["validation_accuracy"] for epoch in history.epochs] == ACCURACIES
    assert history.best_epoch["epoch"] == 2


def records(**columns: list[float]) -> StepRecord:
    """The records of two steps."""
    defaults = {"loss": [1.5, 1.0], "cross_entropy": [1, 0], "accuracy": [1, 1], "grad_norm": [1, 1]}
    values = defaults | {"learning_rate": [0.5, 0.5], "num_examples": [2, 1]} | columns
    types = {"skipped": bool}
    metrics = {name: jnp.array(column, types.get(name, jnp.float32)) for name, column in values.items()}
    rows = RowRecord(
        indices=jnp.array([[2, 1], [0, -1]]),
        probability=jnp.array([[0.5, 0.25], [1.0, 0.125]]),
        correct=jnp.array([[True, False], [True, False]]),
    )
    return StepRecord(metrics=metrics, rows=rows)


def added(history: History, params: HostParams | None = None, **columns: list[float]) -> None:
    """Add an epoch of two steps with these records."""
    engine, examples = compiled()
    chunk = next(engine.train(engine.init(seed_keys(0)), examples, steps_per_call=3))
    history.add(dataclasses.replace(chunk, records=records(**columns)), params or {}, {"loss": 1.0, "accuracy": 0.5})


def test_step_without_examples_has_no_loss_and_counts_in_no_mean() -> None:
    history = History((), {}, 3)
    added(history, num_examples=[2, 0], loss=[1.5, 0.0], accuracy=[1, 0], grad_norm=[1, 0])
    (epoch,), (steps,) = history.epochs, history.steps
    assert (epoch["loss"], epoch["cross_entropy"], epoch["accuracy"]) == (1.5, 1.0, 1.0)
    for name in ("loss", "cross_entropy", "accuracy"):
        assert np.isnan(steps[name]).tolist() == [False, True], name
    assert steps["grad_norm"].tolist() == [1, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_an_error(value: float) -> None:
    """The sums of a private training are finite whatever its weights are."""
    with pytest.raises(FloatingPointError, match=r"the weights after epoch 1 are not finite, at learning rate 0.5 in"):
        added(History((), {}, 10), {"bias": np.array([0.0, value])})


@pytest.mark.parametrize(("column", "subject"), [("loss", "loss"), ("grad_norm", "gradient")])
def test_divergence_names_quantity_and_step(column: str, subject: str) -> None:
    history = History((), {}, 10)
    with pytest.raises(
        FloatingPointError, match=rf"the {subject} of step 2 in epoch 1 .* was 1\.5, at learning rate 0\.5"
    ):
        added(history, **{column: [1.5, np.nan]})
    assert history.epochs == []


def test_a_skipped_step_is_no_fault_and_counts_for_no_mean() -> None:
    history = History((), {}, 10)
    added(history, loss=[2.0, 7.0], grad_norm=[1.0, np.inf], loss_scale=[8.0, 8.0], skipped=[0, 1])
    assert (history.epochs[0]["loss"], history.epochs[0]["cross_entropy"]) == (2.0, 1.0)


def test_an_epoch_of_skipped_steps_is_a_fault() -> None:
    with pytest.raises(FloatingPointError, match="step 1 in epoch 1"):
        added(History((), {}, 10), grad_norm=[np.nan, np.inf], loss_scale=[1.0, 1.0], skipped=[1, 1])


def test_a_training_has_stalled_when_its_best_epoch_is_old_enough(run: tuple[History, list[np.ndarray]]) -> None:
    history, _ = run
    assert [history.has_stalled(patience) for patience in (None, 1, 2, 3)] == [False, True, True, False]


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
