"""The exported forward pass: for every network, equal to the jitted one, with any number of images."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from exports import random_params
from factories import NUM_CLASSES, SHAPE, SMALL_CNN, SMALL_MIXER, SMALL_RESNET, model_config, random_split

from gradtrail.core.evaluate import evaluate_logits, log_mean_softmax
from gradtrail.core.export import TEMPERATURE, export_forward, forward, tensors
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model, ModelConfig

IMAGES = random_split(5).images
PLAIN = {"channels": (4,), "hidden": (5,)}


def network(**overrides: Any) -> ModelConfig:
    return model_config(network=dataclasses.replace(SMALL_CNN, **(PLAIN | overrides)))


NETWORKS = {
    "linear": model_config("linear"),
    "mlp": model_config(),
    "dropout": model_config(MLP(hidden=(5, 4), activation="relu", dropout=0.5)),
    "bfloat16": model_config(precision="bfloat16"),
    "float16": model_config(precision="float16"),
    "cnn": network(),
    "group norm": network(norm="group", convolutions=2),
    "layer norm": network(norm="layer", kernel_size=1),
    "resnet": model_config(SMALL_RESNET, image_shape=(8, 8, 3), normalization=((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))),
    "mixer": model_config(SMALL_MIXER),
    "color cnn": dataclasses.replace(network(), image_shape=(8, 6, 3)),
    "cnn, bfloat16": dataclasses.replace(network(hidden=()), precision="bfloat16"),
}


def params_of(model: Model, count: int) -> list[Any]:
    return [random_params(model, seed) for seed in range(count)]


@pytest.mark.parametrize(
    ("name", "num_members", "count"),
    [
        ("mlp", 1, 1),
        ("mlp", 2, 3),
        ("mixer", 2, 3),
        ("cnn", 2, 1),
        *(pytest.param(name, 1, 3, marks=() if name == "cnn" else pytest.mark.slow) for name in NETWORKS),
    ],
)
def test_equal_to_the_jitted_forward_pass_at_any_batch_size(name: str, num_members: int, count: int) -> None:
    model = Model(NETWORKS[name])
    images = random_split(count, shape=model.config.image_shape).images
    by_name = tensors(params_of(model, num_members), 0.7)
    exported = jax.jit(export_forward(model, by_name, num_members, "cpu").call)
    jitted = jax.jit(forward(model, num_members))
    np.testing.assert_array_equal(exported(by_name, images), jitted(by_name, images))


@pytest.mark.parametrize("num_members", [1, 3])
def test_the_probabilities_are_those_of_the_evaluation(num_members: int) -> None:
    """Also of an example that is wrong with a confidence at which probabilities underflow in float32."""
    model = Model(NETWORKS["mlp"])
    members = [jax.tree.map(lambda leaf: 10 * leaf, params) for params in params_of(model, num_members)]
    apply, exported = jax.jit(model.apply), jax.jit(forward(model, num_members))
    logits = np.array([apply(params, IMAGES) for params in members])
    assert np.min(logits.min(axis=2) - logits.max(axis=2)) < np.log(2.0**-149)
    mean = log_mean_softmax(logits.astype(np.float64)) if num_members > 1 else logits[0]
    for temperature in (0.05, 0.7, 20.0):
        result = evaluate_logits(mean, mean.argmin(axis=1), temperature=temperature, calibration_bins=5)
        results = np.asarray(exported(tensors(members, temperature), IMAGES))
        assert results.shape == (5, NUM_CLASSES)
        np.testing.assert_allclose(results, result.probabilities, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(-np.log(results.min(axis=1)), result.example_loss, rtol=1e-5)  # none underflows


def test_tensors_are_named_by_their_paths_and_those_of_members_are_stacked() -> None:
    model = Model(NETWORKS["mlp"])
    one, three = tensors(params_of(model, 1), 2.0), tensors(params_of(model, 3), 2.0)
    assert (
        set(one) == set(three) == {TEMPERATURE, *(f"layers/{k}/{name}" for k in (0, 1) for name in ("bias", "kernel"))}
    )
    assert one["layers/0/kernel"].shape == (SHAPE[0] * SHAPE[1], 5)
    assert three["layers/0/kernel"].shape == (3, *one["layers/0/kernel"].shape)
    assert one[TEMPERATURE] == three[TEMPERATURE] == np.float32(2)
