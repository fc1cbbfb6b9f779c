"""The networks and their work, which the benchmarks write out for each library, are the same for any image size."""

import argparse
import dataclasses
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from benchmarks import per_example_gradients, per_example_peers, training
from benchmarks.training_peers import bare, flax_network, lesson, ours, project_train_config, without_jit
from benchmarks.training_tasks import (
    LEARNING_RATE,
    NUM_CLASSES,
    WEIGHT_DECAY,
    ModelName,
    image_shape,
    make_data,
    suffix_of,
)
from gradtrail.core.nn.models import Model
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import TrainingFunctions

BATCH, SHAPE = 32, (4, 4)
ROWS = {
    name: dataclasses.replace(task, batch_size=BATCH, examples=BATCH)
    for name, (task, *_) in training.tasks_by_row(*training.SETTINGS[0], BATCH, SHAPE).items()
}
OPTIMIZERS = {
    "adam": optax.adam(LEARNING_RATE),
    "adamw": optax.adamw(
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    ),
    "muon": optax.contrib.muon(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
}


SIXTEEN_BITS = {"bfloat16": "bf16", "float16": "f16"}


@pytest.mark.slow
@pytest.mark.parametrize("row", [name for name, task in ROWS.items() if task.loop != "pytorch"])
def test_row_trains_as_its_name_says(row: str) -> None:
    """One step of the whole batch changes the weights as Optax does, with matrix products of the precision."""
    task = ROWS[row]
    images, labels = map(jnp.asarray, make_data(BATCH, SHAPE))
    config = project_train_config(task.model, BATCH, task.precision, task.optimizer)
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        match task.loop:
            case "lesson" | "without_jit":
                graphdef, params = nnx.split(flax_network("mlp", SHAPE), nnx.Param)
                apply, train = lambda params: nnx.merge(graphdef, params)(images.reshape(BATCH, -1) / 255), lesson
                train = lesson if task.loop == "lesson" else without_jit
            case "bare":
                params = model.init(key=jax.random.key(0))
                apply, train = lambda params: model.apply(params, images), bare
            case _:
                training = TrainingFunctions(config, model, BATCH, jax.local_devices())
                params = training.init(keys_of(config.seeds_of(config.seed))).params
                apply, train = lambda params: model.apply(params, images), ours

        def loss_fn(params: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(apply(params), labels).mean()

        words = row.split(", ")
        assert task.processor == ("native" if "native" in words else "any")
        optimizer = OPTIMIZERS[words[-1] if words[-1] in OPTIMIZERS else "adam"]
        updates, _ = optimizer.update(jax.grad(loss_fn)(params), optimizer.init(params), params)
        found = jax.tree.map(jnp.subtract, train(task)(), params)
        used = {*re.findall(r"\b(b?f16)\[", str(jax.make_jaxpr(apply)(params)))}
    assert used == {SIXTEEN_BITS[word] for word in words if word in SIXTEEN_BITS}
    for change, update in zip(jax.tree.leaves(found), jax.tree.leaves(updates), strict=True):
        assert jnp.linalg.norm(change - update) < (0.2 if used else 1e-3) * jnp.linalg.norm(update)


@pytest.mark.slow
def test_per_example_benchmark_scores_every_example() -> None:
    task = per_example_peers.ScoreTask(method="ours", model="mlp", batch_size=0, examples=BATCH, image_shape=SHAPE)
    scores = per_example_peers.this_project(task)()
    assert {len(leaf) for leaf in jax.tree.leaves(scores)} == {BATCH}


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        *itertools.product(["mlp", "cnn"], [(28, 28), (32, 32, 3), (13, 20), (12, 17, 4)]),
        ("resnet", (28, 28)),
        ("resnet", (32, 48, 3)),
    ],
)
def test_networks_have_the_same_weights(model: ModelName, shape: tuple[int, ...]) -> None:
    config = project_train_config(model, 5)
    ours = Model(config.model_config(shape, NUM_CLASSES)).abstract_params()
    lesson = nnx.state(nnx.eval_shape(lambda: flax_network(model, shape)), nnx.Param)
    kernels = sorted(leaf.size for leaf in jax.tree.leaves(lesson) if leaf.ndim > 1)
    assert sorted(leaf.size for leaf in jax.tree.leaves(ours) if leaf.ndim > 1) == kernels


def test_images_have_the_shape_of_the_option_and_name_the_results_file() -> None:
    assert image_shape("32x48x3") == (32, 48, 3)
    images, labels = make_data(7, (32, 48, 3))
    assert (images.shape, labels.shape) == ((7, 32, 48, 3), (7,))
    assert (suffix_of((32, 48, 3)), suffix_of(image_shape("28x28"))) == ("-32x48x3", "")
    tasks = per_example_gradients.tasks((32, 48, 3))
    assert {task.image_shape for task in tasks} == {(32, 48, 3)}
    assert f"MLP: {math.prod((32, 48, 3))}-256" in training.networks((32, 48, 3))


@pytest.mark.parametrize("text", ["32", "32x0", "ax28"])
def test_other_texts_are_no_shape(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^must be HEIGHTxWIDTH or HEIGHTxWIDTHxCHANNELS, got "):
        image_shape(text)
