"""Training is what its steps say, to the bit, however it is cut and wherever it goes on."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from factories import (
    NUM_CLASSES,
    SHAPE,
    make_engine,
    new_compiler,
    params_on_device,
    random_split,
    run_on_devices,
    run_training,
    seed_keys,
    train_config,
)

from gradtrail.core import batching
from gradtrail.core.config import ConfigError
from gradtrail.core.nn import inference
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model
from gradtrail.core.sharding import make_mesh
from gradtrail.core.train import loop
from gradtrail.core.train.augmentation import NO_AUGMENTATION
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.loop import Chunk, CompiledTraining, TrainingFunctions
from gradtrail.core.train.loss_scaling import LossScalingConfig
from gradtrail.core.train.optimizers import SGD
from gradtrail.core.train.step import StepRecord, TrainState

SPLIT = random_split(10)  # in batches of 4: the last one holds 2
PLAIN = {
    "model": "linear",
    "schedule": "constant",
    "optimizer": SGD(learning_rate=0.1, momentum=0.0, nesterov=False),
    "clip_norm": None,
}


NOISY = "noisy float16 with an average"
PARTS = "convolutions in bfloat16 by parts"
MIXED = LossScalingConfig(initial=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=1, minimum=1.0)
CONFIGS = {
    "plain": train_config(),
    NOISY: train_config(
        model=MLP(hidden=(5,), activation="relu", dropout=0.5),
        augmentation=dataclasses.replace(NO_AUGMENTATION, shift=1.0, rotation=10.0, scale=0.1, shear=5.0, cutout=1),
        precision="float16",
        loss_scaling=MIXED,
        average_decay=0.9,
    ),
    PARTS: train_config(model="cnn", precision="bfloat16", accumulation_steps=2),
}
SATURATED, CROPPED = (dataclasses.replace(NO_AUGMENTATION, **{k: v}) for k, v in (("saturation", 0.1), ("crop", 3)))
every_config = pytest.mark.parametrize("name", CONFIGS)


def compiled(name: str) -> tuple[CompiledTraining, Examples]:
    return make_engine(CONFIGS[name], SPLIT)


@functools.cache
def whole(name: str = "plain") -> list[Chunk]:
    """A training in one go."""
    return run_training(*compiled(name))


def same_bits(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def state_bits(state: TrainState) -> list[bytes]:
    state = dataclasses.replace(state, keys=jax.tree.map(jax.random.key_data, state.keys))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def record_bits(records: StepRecord, *, after: int = 0) -> list[bytes]:
    """Every bit of the records of an epoch, its first steps left out."""
    return [np.asarray(leaf)[after:].tobytes() for leaf in jax.tree.leaves(records)]


def bits(chunk: Chunk) -> list[bytes]:
    return state_bits(chunk.state) + record_bits(chunk.records)


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
    state = engine.init(seed_keys(0))
    params, number = jax.device_get(state.params), 0
    for chunk in run_training(engine, examples, steps_per_call=1):
        order = np.asarray(engine.order(state.keys, jnp.int32(chunk.epoch - 1)))
        rows = order[number % 3][order[number % 3] != batching.PADDING]
        assert len(rows) == (2 if number % 3 == 2 else 4), "the last batch of an epoch holds what is left"
        params, record = softmax_step(params, SPLIT.images[rows], SPLIT.labels[rows], 0.1, 0.1)
        for name, value in record.items():
            np.testing.assert_allclose(chunk.records.metrics[name][number % 3], value, rtol=1e-4, err_msg=name)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), chunk.state.params, params)
        number += 1
    assert number == engine.num_steps == 6


@every_config
@pytest.mark.parametrize("steps_per_call", [1, 2, 3, 7])
def test_steps_per_call_change_no_bit(steps_per_call: int, name: str) -> None:
    ends = [chunk for chunk in run_training(*compiled(name), steps_per_call=steps_per_call) if chunk.ends_epoch]
    assert [bits(chunk) for chunk in ends] == [bits(chunk) for chunk in whole(name)]
    assert [chunk.epoch for chunk in ends] == [1, 2]


@every_config
def test_same_seed_same_bits_other_seed_other_bits(name: str) -> None:
    assert [bits(chunk) for chunk in run_training(*compiled(name))] == [bits(chunk) for chunk in whole(name)]
    other = run_training(*compiled(name), seed=1)[-1]
    assert state_bits(other.state) != state_bits(whole(name)[-1].state)
    assert other.records.metrics["loss"].tobytes() != whole(name)[-1].records.metrics["loss"].tobytes()


def test_loss_scaling_skips_some_steps() -> None:
    """Else the properties above would say little of loss scaling."""
    skipped = np.concatenate([chunk.records.metrics["skipped"] for chunk in whole(NOISY)])
    rates = np.concatenate([chunk.records.metrics["learning_rate"] for chunk in whole(NOISY)])
    assert np.any(skipped[1:] > skipped[:-1])
    assert np.any(skipped[1:] < skipped[:-1])
    assert np.sum(rates[~skipped] > 0) >= 2


def test_records_stand_at_their_steps_and_the_rest_is_empty() -> None:
    chunks = run_training(*compiled("plain"), steps_per_call=2)
    assert [(chunk.epoch, chunk.step, chunk.ends_epoch) for chunk in chunks] == [
        (1, 2, False),
        (1, 3, True),
        (2, 5, False),
        (2, 6, True),
    ]
    assert [int(chunk.state.step) for chunk in chunks] == [2, 3, 5, 6]
    np.testing.assert_array_equal(chunks[0].records.metrics["loss"] > 0, [True, True, False])
    np.testing.assert_array_equal(chunks[1].records.metrics["loss"][:2], chunks[0].records.metrics["loss"][:2])


@pytest.mark.parametrize(
    ("sizes", "num_examples", "message"),
    [
        ({"augmentation": SATURATED}, 9, r"augmentation\.saturation must be 0 for greyscale images, got 0\.1$"),
        ({"augmentation": CROPPED}, 9, r"augmentation\.crop must be below the shorter side of the images, 3, got 3$"),
        ({"epochs": 100_000, "batch_size": 1}, 60_000, "epochs 100,000 times 60,000 steps, of batch_size 1, are 6,0"),
    ],
)
def test_sizes_that_do_not_suit_the_data_are_refused(sizes: dict, num_examples: int, message: str) -> None:
    config = train_config(**sizes)
    with pytest.raises(ConfigError, match=rf"^train\.{message}"):
        TrainingFunctions(config, Model(config.model_config(SHAPE, NUM_CLASSES)), num_examples, jax.devices())


@pytest.mark.parametrize("parts", [1, 4])
def test_a_batch_larger_than_the_split_has_all_examples(parts: int) -> None:
    """With 4 parts of 8 rows, the last two are empty."""
    settings = {**PLAIN, "model": CONFIGS[NOISY].model, "accumulation_steps": parts}
    (*_, larger), (*_, equal) = (
        run_training(*make_engine(train_config(**(settings | sizes)), SPLIT))
        for sizes in ({"batch_size": 32}, {"batch_size": 10, "accumulation_steps": 1})
    )
    assert larger.step == equal.step == 2
    for name, values in equal.records.metrics.items():
        np.testing.assert_allclose(larger.records.metrics[name], values, rtol=1e-5, err_msg=name)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), larger.state.params, equal.state.params
    )


def test_the_parameters_to_evaluate_are_the_trained_ones_or_their_average() -> None:
    plain, noisy, _ = (whole(name)[-1].state for name in CONFIGS)
    assert plain.evaluation_params is plain.params
    assert noisy.evaluation_params is noisy.average
    assert not same_bits(noisy.average, noisy.params)


@pytest.mark.slow
def test_a_training_to_look_into_gives_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    config = train_config(**PLAIN)
    engine, examples = make_engine(config, SPLIT)
    initial, expected = engine.init(seed_keys(0)), run_training(engine, examples)[-1]
    training = TrainingFunctions(config, Model(config.model_config(SHAPE, NUM_CLASSES)), len(SPLIT), jax.devices())
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # indices then are NumPy's or Python's integers
    with jax.disable_jit():
        looked_into = training.compile(new_compiler())
        chunks = run_training(looked_into, examples, state=initial, steps_per_call=2)
    assert [(chunk.step, int(chunk.state.step)) for chunk in chunks] == [(2, 2), (3, 3), (5, 5), (6, 6)]
    for part in ("params", "opt_state"):
        result, target = getattr(chunks[-1].state, part), getattr(expected.state, part)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), result, target)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), chunks[-1].records, expected.records)


def scores_on(num_devices: int, count: int) -> dict[str, np.ndarray]:
    """The scores of the first `count` examples, in the batches of a split of this size on these devices."""
    model, mesh = Model(CONFIGS[NOISY].model_config(SHAPE, NUM_CLASSES)), make_mesh(jax.devices()[:num_devices])
    split = random_split(24)[:count]
    examples = loop.on_device(split.images, split.labels, mesh)
    params = loop.put(params_on_device(model), loop.replicated(mesh))
    function = loop.compile_validate(model, count, mesh, compiler=new_compiler()).function
    with jax.transfer_guard("disallow"):
        scores = function(params, examples)
    return {name: np.asarray(values) for name, values in scores.items()}


@pytest.mark.parametrize(("count", "largest"), [(1, 8), (5, 8), (23, 8), (24, 8), (23, 1), (24, 1000)])
def test_scores_are_those_of_each_example_in_order(count: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "VALIDATION_BATCH_SIZE", largest)
    scores, split = scores_on(1, count), random_split(24)[:count]
    model = Model(CONFIGS[NOISY].model_config(SHAPE, NUM_CLASSES))
    predict = inference.compile_predict_within(model, largest, compiler=new_compiler())
    expected = predict(params_on_device(model), split.images, split.labels)
    assert len({*expected["loss"].tolist()}) == count, "no two examples have the same loss"
    if count % largest:
        np.testing.assert_allclose(scores["loss"], expected["loss"], rtol=1e-6)
    else:
        assert scores["loss"].tobytes() == expected["loss"].tobytes()
    np.testing.assert_array_equal(scores["correct"], expected["correct"])
    means = inference.mean_scores(jax.tree.map(jnp.asarray, scores))
    assert means == {"loss": np.mean(scores["loss"].astype(np.float64)), "accuracy": expected["correct"].mean()}


SHARDED = """
import numpy as np
from test_loop import loop, scores_on
for loop.VALIDATION_BATCH_SIZE, count in ((8, 24), (8, 23), (2, 23), (8, 2)):
    parts, whole = scores_on(3, count), scores_on(1, count)
    for name in ("loss", "correct"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-6)
print("same scores")
"""


def test_devices_that_share_a_validation_give_the_same_scores() -> None:
    folder = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    assert run_on_devices(folder + SHARDED, 3) == "same scores\n"
