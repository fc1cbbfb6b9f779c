"""Training is what its steps say, to the bit, however it is cut and wherever it goes on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import (
    NUM_CLASSES,
    SHAPE,
    copied,
    make_engine,
    random_split,
    run_training,
    train_config,
)

from gradtrail.core import batches
from gradtrail.core.examples import Split
from gradtrail.core.models import MLPConfig, Model
from gradtrail.core.optimizers import SGDConfig
from gradtrail.core.training import Chunk, Engine, Examples, StepRecord, TrainConfig

SPLIT = random_split(10)  # in batches of 4: the last one holds 2
PLAIN = {
    "model": "linear",
    "schedule": "constant",
    "sgd": SGDConfig(momentum=0.0, nesterov=False),
    "clip_norm": None,
}


@functools.cache
def small() -> tuple[Engine, Examples]:
    return make_engine(train_config(), SPLIT)


@functools.cache
def whole() -> list[Chunk]:
    """The small training in one go."""
    return run_training(*small())


def bits(chunk: Chunk) -> list[bytes]:
    """Every bit of a state and of the records."""
    state = dataclasses.replace(chunk.state, key=jax.random.key_data(chunk.state.key))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state, chunk.records))]


def softmax_step(
    params: dict, images: np.ndarray, labels: np.ndarray, rate: float, smoothing: float
) -> tuple[dict, dict]:
    """One step of gradient descent on softmax regression, in NumPy and float64."""
    layer = {name: np.asarray(leaf, np.float64) for name, leaf in params["layers"][0].items()}
    inputs = images.reshape(len(images), -1) / 255.0
    logits = inputs @ layer["kernel"] + layer["bias"]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    targets = (1 - smoothing) * np.eye(NUM_CLASSES)[labels] + smoothing / NUM_CLASSES
    error = (probabilities - targets) / len(images)
    grads = {"kernel": inputs.T @ error, "bias": error.sum(axis=0)}
    record = {
        "loss": -np.mean(np.sum(targets * np.log(probabilities), axis=1)),
        "accuracy": np.mean(np.argmax(logits, axis=1) == labels),
        "grad_norm": np.sqrt(sum(np.sum(grad**2) for grad in grads.values())),
        "learning_rate": rate,
    }
    return {"layers": {0: {name: layer[name] - rate * grads[name] for name in layer}}}, record


def test_every_step_equals_gradient_descent_by_hand_with_only_real_rows_counted() -> None:
    config = train_config(**PLAIN)
    engine, examples = make_engine(config, SPLIT)
    state = engine.init(jax.random.key(0))
    params, number = jax.device_get(state.params), 0
    for chunk in run_training(engine, examples, steps_per_call=1):
        order = np.asarray(engine.order(state.key, jnp.int32(chunk.epoch - 1)))
        rows = order[number % 3][order[number % 3] != batches.PADDING]
        assert len(rows) == (2 if number % 3 == 2 else 4), "the last batch of an epoch holds what is left"
        params, record = softmax_step(params, SPLIT.images[rows], SPLIT.labels[rows], 0.1, 0.1)
        for name, value in record.items():
            np.testing.assert_allclose(getattr(chunk.records, name)[number % 3], value, rtol=1e-4, err_msg=name)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), chunk.state.params, params)
        number += 1
    assert number == engine.num_steps == 6


def test_an_optimizer_is_applied_with_the_rate_of_its_step() -> None:
    """Two steps of clipped Nesterov momentum under the warm-up, the second by hand from the first."""
    engine, examples = make_engine(train_config(clip_norm=0.01), SPLIT)
    chunks = run_training(engine, examples, steps_per_call=1)
    assert float(chunks[0].records.learning_rate[0]) == 0, "the warm-up begins at 0"
    initial = engine.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, chunks[0].state.params, initial.params)
    rate = float(chunks[1].records.learning_rate[1])
    moved = jax.tree.map(lambda new, old: new - old, chunks[1].state.params, chunks[0].state.params)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(moved)))
    assert rate == pytest.approx(0.05)
    assert 0 < norm <= rate * 0.01 * (1 + 0.9 + 0.81) * 1.001, "no more than the clipped gradients with momentum"
    assert float(chunks[1].records.grad_norm[1]) > 0.01, "recorded before clipping"


@pytest.mark.parametrize("steps_per_call", [1, 2, 3, 7])
def test_where_an_epoch_is_cut_changes_no_bit(steps_per_call: int) -> None:
    ends = [chunk for chunk in run_training(*small(), steps_per_call=steps_per_call) if chunk.ends_epoch]
    assert [bits(chunk) for chunk in ends] == [bits(chunk) for chunk in whole()]
    assert [chunk.epoch for chunk in ends] == [1, 2]


def test_a_training_goes_on_to_the_same_bits_from_every_step() -> None:
    engine, examples = small()
    for chunk in run_training(engine, examples, steps_per_call=1):
        rest = run_training(engine, examples, state=copied(chunk).state)
        if chunk.step == engine.num_steps:
            assert not rest
            continue
        assert rest[-1].step == engine.num_steps
        continued, uninterrupted = bits(rest[-1]), bits(whole()[-1])
        num_records = 4 if chunk.step >= 3 else 0  # those of the steps before are the earlier process's
        assert continued[: len(continued) - num_records] == uninterrupted[: len(continued) - num_records]
        done = chunk.step % 3 if chunk.step > 3 else 0
        for name in ("loss", "accuracy", "grad_norm", "learning_rate"):
            after, expected = (getattr(part.records, name)[done:] for part in (rest[-1], whole()[-1]))
            np.testing.assert_array_equal(after, expected)


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    assert [bits(chunk) for chunk in run_training(*small())] == [bits(chunk) for chunk in whole()]
    other = run_training(*small(), seed=1)[-1]
    assert not np.array_equal(
        other.state.params["layers"][0]["kernel"], whole()[-1].state.params["layers"][0]["kernel"]
    )


def test_each_epoch_has_its_own_order() -> None:
    engine, _ = small()
    orders = [np.asarray(engine.order(jax.random.key(0), jnp.int32(epoch))) for epoch in (0, 0, 1)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert np.any(orders[0] != orders[2])


def test_records_stand_at_their_steps_and_the_rest_is_empty() -> None:
    chunks = run_training(*small(), steps_per_call=2)
    assert [(chunk.epoch, chunk.step, chunk.ends_epoch) for chunk in chunks] == [
        (1, 2, False),
        (1, 3, True),
        (2, 5, False),
        (2, 6, True),
    ]
    assert [int(chunk.state.step) for chunk in chunks] == [2, 3, 5, 6]
    np.testing.assert_array_equal(chunks[0].records.loss > 0, [True, True, False])
    np.testing.assert_array_equal(chunks[1].records.loss[:2], chunks[0].records.loss[:2])


def test_a_training_is_traced_once_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    real = Model.apply
    monkeypatch.setattr(Model, "apply", lambda *args: traces.append(args[2].shape) or real(*args))
    engine, examples = make_engine(train_config(epochs=3), SPLIT)
    assert set(traces) == {(4, *SHAPE)}
    at_compilation = len(traces)
    run_training(engine, examples, steps_per_call=1)
    assert len(traces) == at_compilation, "a call traced the network again"


def test_the_compiled_functions_are_named_for_the_profile() -> None:
    assert [function.name for function in small()[0].functions] == ["init", "order", "train_step"]


@pytest.mark.parametrize(("optimizer", "precision"), [("sgd", "float32"), ("adamw", "bfloat16")])
def test_the_loss_falls_on_real_digits(optimizer: str, precision: str, digits: Split) -> None:
    config = train_config(
        optimizer=optimizer,
        precision=precision,
        epochs=8,
        batch_size=32,
        mlp=MLPConfig(hidden=(32,)),
        learning_rate={"sgd": 0.1, "adamw": 0.01}[optimizer],
    )
    engine, examples = make_engine(config, digits, num_classes=10)
    chunks = run_training(engine, examples)
    first, last = (float(np.mean(chunks[index].records.loss)) for index in (0, -1))
    assert last < first / 2
    assert np.mean(chunks[-1].records.accuracy) > 0.95
    assert {leaf.dtype for leaf in jax.tree.leaves(chunks[-1].state.params)} == {np.dtype("float32")}


def test_one_step_from_fixed_weights_gives_the_golden_values() -> None:
    config = train_config(**PLAIN | {"model": "mlp"})
    engine, examples = make_engine(config, SPLIT)
    state = engine.init(jax.random.key(0))
    fixed = jax.tree.map(
        lambda leaf: jnp.sin(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape), state.params
    )
    order = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    state, records = engine.run_steps(
        dataclasses.replace(state, params=fixed), StepRecord.empty(3), examples, order, jnp.int32(0), jnp.int32(1)
    )
    golden = {"loss": 1.2522082, "grad_norm": 1.8862536, "bias": 0.0299376}
    found = {
        "loss": float(records.loss[0]),
        "grad_norm": float(records.grad_norm[0]),
        "bias": float(state.params["layers"][1]["bias"][0]),
    }
    assert found == pytest.approx(golden, rel=1e-4), (
        "One optimizer step changed what it computes. Change these values only together with a wanted change of the "
        "loss, the network or the update rule, and say so in the change's description: old runs no longer compare."
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("seed", 2**32),
        ("epochs", 0),
        ("batch_size", 0),
        ("learning_rate", 0.0),
        ("label_smoothing", 1.0),
        ("clip_norm", 0.0),
        ("keep_epochs", (0, -1)),
    ],
)
def test_values_out_of_range_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be "):
        train_config(**{key: value})


def test_only_the_chosen_kind_decides_the_network() -> None:
    config: TrainConfig = train_config(model="linear")
    assert config.model_config(SHAPE, NUM_CLASSES).layer_widths == (12, NUM_CLASSES)
