"""The mixer and the fixed features of `pipeline/networks`: their definitions, in NumPy or in loops, in float64."""

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exports import random_params
from factories import model_config, own_network, random_split

from gradtrail.core.config import ConfigError
from gradtrail.core.gradient_check import check_gradients
from gradtrail.core.nn.models import Model, num_parameters
from gradtrail.core.nn.own import Own
from gradtrail.core.per_example import unknown_layers

MODULE: Any = sys.modules[type(own_network("fixed_features").config).__module__]
NORM, NUM_FEATURES = MODULE.NORM, MODULE.NUM_FEATURES
FEATURES = jax.jit(MODULE.gradient_features)
STRAIGHTENED = jax.jit(MODULE.straightened)


def draw(shape: tuple[int, int], count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).uniform(size=(count, *shape)).astype(np.float32)


def defined(image: np.ndarray) -> np.ndarray:
    """The features of one image, in loops over pixels, cells and directions, in float64."""
    height, width = image.shape
    pixels = np.pad(image.astype(np.float64), 1)
    cells = list(itertools.product(range(8), range(8)))
    result = {cell: np.zeros(8) for cell in cells}
    for row, column, (i, j) in itertools.product(range(height), range(width), cells):
        across = pixels[row + 1, column + 2] - pixels[row + 1, column]
        down = pixels[row + 2, column + 1] - pixels[row, column + 1]
        y, x = (row + 0.5) * 8 / height - (i + 0.5), (column + 0.5) * 8 / width - (j + 0.5)
        weight = math.exp(-(x**2 + y**2) / (2 * 0.7**2)) * math.hypot(across, down)
        for index in range(8):
            cosine = math.cos(math.atan2(down, across) - index * math.pi / 4)
            result[i, j][index] += weight * max(0.0, cosine) ** 4
    near = {
        a: sum(math.exp(-(math.dist(a, b) ** 2) / (2 * 1.5**2)) * np.sum(result[b] ** 2) for b in cells) for a in cells
    }
    floor = 0.1 * np.mean(list(near.values()))
    normal = {cell: result[cell] / math.sqrt(near[cell] + floor) for cell in cells}
    parts = [normal[cell] - normal[cell].mean() for cell in cells]
    pairs = [(i, j) for i in range(8) for j in range(i, 8)]
    lengths = [math.sqrt(np.sum(part**2) + 1e-6) for part in parts]
    products = [
        part[i] * part[j] / length * (1 if i == j else math.sqrt(2))
        for part, length in zip(parts, lengths, strict=True)
        for i, j in pairs
    ]
    return np.concatenate(
        [NORM / math.sqrt(2) * np.array(item).ravel() / np.linalg.norm(item) for item in (parts, products)]
    )


def test_oriented_gradients_equal_the_definition() -> None:
    images = draw((6, 9), 2)
    result = FEATURES(images)
    assert result.shape == (2, NUM_FEATURES) == (2, 64 * (8 + 36))
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, [defined(image) for image in images], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 3), (1, 1)])
def test_features_have_one_norm_none_of_empty_images_and_do_not_depend_on_the_batch(shape: tuple[int, int]) -> None:
    images = draw(shape) * np.array([1, 1, 0], np.float32)[:, None, None]
    result = FEATURES(images)
    np.testing.assert_allclose(np.linalg.norm(result, axis=1), [NORM, NORM, 0] if shape != (1, 1) else 0, rtol=1e-4)
    np.testing.assert_allclose(STRAIGHTENED(images)[2], 0)
    whole = FEATURES(STRAIGHTENED(images))
    assert np.all(np.isfinite(whole))
    np.testing.assert_allclose(whole[1:2], FEATURES(STRAIGHTENED(images[1:2])), atol=1e-5)


def defined_straight(image: np.ndarray) -> np.ndarray:
    """A straightened image, in loops over pixels, in float64."""
    height, width = image.shape
    pixels = list(itertools.product(range(height), range(width)))
    mass = image.astype(np.float64).sum()

    def mean(identity: Callable[[int, int], float]) -> float:
        return sum(image[y, x] * identity(y, x) for y, x in pixels) / mass

    middle_y, middle_x = mean(lambda y, x: y), mean(lambda y, x: x)
    slope = mean(lambda y, x: (y - middle_y) * (x - middle_x)) / mean(lambda y, x: (y - middle_y) ** 2)
    sd = math.sqrt(mean(lambda y, x: (x - middle_x - slope * (y - middle_y)) ** 2))
    stretch = min(max(width / 7 / sd, 2 / 3), 3 / 2)
    result = np.zeros(image.shape)
    for y, x in pixels:
        source = middle_x + slope * (y - middle_y) + (x - (width - 1) / 2) / stretch
        result[y, x] = np.interp(source, np.arange(-1, width + 1), np.pad(image[y], 1))
    return result


def test_straightened_images_equal_the_definition() -> None:
    images = draw((6, 9), 2)
    result = STRAIGHTENED(images)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, [defined_straight(image) for image in images], atol=1e-4)


def logits_of(network: Own, params: dict, images: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(Model(model_config(network, image_shape=images.shape[1:])).apply)(params, images))


def test_logits_of_a_linear_layer_are_those_of_the_features() -> None:
    network, images = own_network("fixed_features", kind="oriented_gradients"), random_split(7, shape=(9, 6)).images
    params = random_params(Model(model_config(network, image_shape=(9, 6))), 0)
    features = FEATURES(STRAIGHTENED(images / np.float32(255)))
    expected = np.asarray(features).reshape(7, -1) @ params["layers"][0]["kernel"] + params["layers"][0]["bias"]
    np.testing.assert_allclose(logits_of(network, params, images), expected, rtol=1e-4, atol=1e-4)


def mixed(network: Any, params: dict, images: np.ndarray) -> np.ndarray:
    """The mixer as in its paper: X + W₂ σ(W₁ norm(X)) on the columns of X (tokens × channels), then on its rows."""

    def mlp(inputs: np.ndarray, block: dict, name: str) -> np.ndarray:
        first, second = (block[f"{name}_{side}"] for side in ("in", "out"))
        hidden = np.tanh(inputs @ first["kernel"][0, 0] + first["bias"])
        return hidden @ second["kernel"][0, 0] + second["bias"]

    def norm(tokens: np.ndarray, layer: dict) -> np.ndarray:
        deviation = np.sqrt(tokens.var(axis=-1, keepdims=True) + 1e-5)
        return (tokens - tokens.mean(axis=-1, keepdims=True)) / deviation * layer["scale"] + layer["bias"]

    size, images = network.patch_size, images.reshape(*images.shape[:3], -1) / 255.0
    windows = np.lib.stride_tricks.sliding_window_view(images, (size, size), axis=(1, 2))[:, ::size, ::size]
    patches = np.moveaxis(windows, 3, -1).reshape(len(images), -1, size**2 * images.shape[-1])
    tokens = patches @ params["embedding"]["kernel"][0, 0] + params["embedding"]["bias"]
    for index in sorted(params["blocks"]):
        block = params["blocks"][index]
        by_channel = np.swapaxes(norm(tokens, block["token_norm"]), 1, 2)
        tokens = tokens + np.swapaxes(mlp(by_channel, block, "token"), 1, 2)
        tokens = tokens + mlp(norm(tokens, block["channel_norm"]), block, "channel")
    return norm(tokens, params["norm"]).mean(axis=1) @ params["layers"][0]["kernel"] + params["layers"][0]["bias"]


def test_logits_of_the_mixer_equal_numpy() -> None:
    shape = (9, 6, 3)
    network = own_network("mixer", patch_size=3, width=4, hidden=(3, 5), activation="tanh")
    images = random_split(7, shape=shape).images
    params = random_params(Model(model_config(network, image_shape=shape)), 0)
    expected = mixed(network.config, params, images)
    np.testing.assert_allclose(logits_of(network, params, images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "count"), [("mixer", 85_290), ("fixed_features", 10 * (2816 + 1))])
def test_defaults_have_fast_and_exact_per_example_gradients(file: str, count: int) -> None:
    model = Model(model_config(own_network(file), image_shape=(28, 28), num_classes=10))
    assert num_parameters(model.abstract_params()) == count
    assert unknown_layers(model) == []
    check_gradients(model)


@pytest.mark.parametrize(
    ("network", "shape", "message"),
    [
        (
            own_network("mixer", patch_size=2),
            (9, 6),
            "^train.own.patch_size must divide both sides of images of 9 × 6 pixels: allowed are 1, 3, got 2",
        ),
        (own_network("fixed_features"), (9, 6, 3), "^fixed_features must have grayscale images, got .* \\(9, 6, 3\\)"),
    ],
    ids=["patches", "color"],
)
def test_images_that_a_network_cannot_take_are_refused(network: Own, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Model(model_config(network, image_shape=shape))
