"""What a history keeps is a copy, and the best epoch is the first of equals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import make_engine, random_split, train_config

from gradtrail.core.history import History
from gradtrail.core.training import StepRecord, train

ACCURACIES = [0.5, 0.75, 0.75, 0.25]


def kernel(params: dict) -> np.ndarray:
    return np.asarray(params["layers"][0]["kernel"])


@pytest.fixture(scope="module")
def run() -> tuple[History, list[np.ndarray]]:
    """A history of four epochs, and the first kernel after each, 0 being the initial one."""
    engine, examples = make_engine(train_config(epochs=4), random_split(10))
    state = engine.init(jax.random.key(0))
    history, kernels = History((0, 1, 3, 9), state.params), [kernel(state.params).copy()]
    for chunk in train(engine, state, examples, steps_per_call=1):
        if chunk.ends_epoch:
            history.add(chunk, {"loss": 1.0, "accuracy": ACCURACIES[chunk.epoch - 1]})
            kernels.append(kernel(chunk.state.params).copy())
    return history, kernels


def test_kept_best_and_final_weights_are_those_of_their_epochs(run: tuple[History, list[np.ndarray]]) -> None:
    history, kernels = run
    assert [kept.epoch for kept in history.kept] == [0, 1, 3]
    assert (history.best.epoch, history.final.epoch) == (2, 4)
    for weights in (*history.kept, history.best, history.final):
        np.testing.assert_array_equal(kernel(weights.params), kernels[weights.epoch])


def test_what_is_kept_shares_no_memory_with_the_device() -> None:
    engine, examples = make_engine(train_config(), random_split(10))
    state = engine.init(jax.random.key(0))
    history = History((0, 1), state.params)
    assert not np.shares_memory(kernel(history.kept[0].params), np.asarray(kernel(state.params)))
    chunk = next(train(engine, state, examples, steps_per_call=3))
    history.add(chunk, {"loss": 1.0, "accuracy": 0.5})
    assert not np.shares_memory(kernel(history.final.params), np.asarray(kernel(chunk.state.params)))
    assert all(leaf.flags.writeable for leaf in jax.tree.leaves(history.final.params)), "a view of the device is not"


def test_records_are_means_over_the_steps_of_their_epoch(run: tuple[History, list[np.ndarray]]) -> None:
    history, _ = run
    assert [record.epoch for record in history.epochs] == [1, 2, 3, 4]
    for record, steps in zip(history.epochs, history.steps, strict=True):
        assert steps.loss.shape == (3,)
        assert record.loss == pytest.approx(float(np.mean(steps.loss)))
        assert record.accuracy == pytest.approx(float(np.mean(steps.accuracy)))
    assert [record.validation_accuracy for record in history.epochs] == ACCURACIES
    assert history.best_record.epoch == 2


def test_the_description_is_one_line_from_the_beginning_on(run: tuple[History, list[np.ndarray]]) -> None:
    history, _ = run
    assert History((), {}).describe() == "first epoch"
    assert history.describe().startswith("epoch 4 · loss ")
    assert history.describe().endswith("validation 25.00%")


def test_a_loss_that_is_not_finite_is_named_with_its_step() -> None:
    split = random_split(8)
    engine, examples = make_engine(train_config(epochs=1, batch_size=4), split)
    state = engine.init(jax.random.key(0))
    history = History((), state.params)
    chunk = next(train(engine, state, examples, steps_per_call=2))
    records = StepRecord(
        loss=jnp.array([1.5, jnp.nan]), accuracy=jnp.ones(2), grad_norm=jnp.ones(2), learning_rate=jnp.full(2, 0.5)
    )
    with pytest.raises(FloatingPointError, match=r"step 2 in epoch 1 .* was 1\.5, at learning rate 0\.5"):
        history.add(dataclasses.replace(chunk, records=records), {"loss": 1.0, "accuracy": 0.5})
    assert history.epochs == []
