"""The networks: shapes, initial weights, and the function they compute, in NumPy and float64."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exports import random_params
from factories import (
    NUM_CLASSES,
    SHAPE,
    SMALL_CNN,
    SMALL_RESNET,
    color_split,
    model_config,
    new_compiler,
    random_split,
)

from gradtrail.core.config import ConfigError
from gradtrail.core.nn.cnn import CNN
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model, ModelConfig, num_parameters
from gradtrail.core.nn.resnet import ResNet
from gradtrail.core.xla.compiler import CompiledFunction

IMAGES = random_split(7).images


def perceptron(*hidden: int, dropout: float = 0.0, **overrides: Any) -> ModelConfig:
    return model_config(MLP(hidden=hidden, activation="relu", dropout=dropout), **overrides)


def network(image_shape: tuple[int, ...] = (9, 6), **overrides: Any) -> ModelConfig:
    cnn = {"channels": (4, 6), "convolutions": 2, "hidden": (5,)} | overrides
    return model_config(image_shape=image_shape, network=dataclasses.replace(SMALL_CNN, **cnn))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda inputs: np.maximum(inputs, 0),
    "tanh": np.tanh,
    "gelu": lambda inputs: inputs / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (inputs + 0.044715 * inputs**3))),
    "silu": lambda inputs: inputs / (1 + np.exp(-inputs)),
}


def classified(layers: dict, activations: np.ndarray, activation: str = "relu") -> np.ndarray:
    """Dense layers with activations between them, in NumPy and float64."""
    for index in sorted(layers):
        layer = layers[index]
        activations = activations @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)
        if index < len(layers) - 1:
            activations = ACTIVATIONS[activation](activations)
    return activations


def convolved(images: np.ndarray, layer: dict) -> np.ndarray:
    """A convolution of images with channels last, in NumPy and float64."""
    kernel, bias = (np.asarray(layer[name], np.float64) for name in ("kernel", "bias"))
    edge = (len(kernel) // 2, len(kernel) // 2)
    padded = np.pad(images, [(0, 0), edge, edge, (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[:2], axis=(1, 2))
    return np.einsum("bhwirc,rcio->bhwo", windows, kernel) + bias


def normalized(images: np.ndarray, layer: dict, num_groups: int | None) -> np.ndarray:
    """Group norm, or without groups layer norm."""
    grouped = images.reshape(*images.shape[:3], num_groups or 1, -1)
    axes = (1, 2, 4) if num_groups else (4,)
    mean, variance = (figure(grouped, axis=axes, keepdims=True) for figure in (np.mean, np.var))
    standardized = ((grouped - mean) / np.sqrt(variance + 1e-5)).reshape(images.shape)
    return standardized * np.asarray(layer["scale"]) + np.asarray(layer["bias"])


def pooled(images: np.ndarray) -> np.ndarray:
    batch, height, width, channels = images.shape
    whole = images[:, : height // 2 * 2, : width // 2 * 2]
    return whole.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def activation_of(config: ModelConfig) -> str:
    return getattr(config.network, "activation", "relu")


def forward(config: ModelConfig, params: dict, images: np.ndarray) -> np.ndarray:
    """The whole network in NumPy."""
    pixels = images / 255.0
    if config.normalization is not None:
        mean, deviation = (np.array(numbers) for numbers in config.normalization)
        pixels = (pixels - mean) / deviation
    if isinstance(config.network, ResNet):
        return residual(config.network, params, pixels.reshape(*images.shape[:3], -1))
    if not isinstance(config.network, CNN):
        return classified(params["layers"], pixels.reshape(len(images), -1), activation_of(config))
    cnn, activations = config.network, pixels.reshape(*images.shape[:3], -1)
    for index in sorted(params["blocks"]):
        block = params["blocks"][index]
        activations = convolved(activations, block["convolution"])
        if cnn.norm != "none":
            activations = normalized(activations, block["norm"], cnn.groups if cnn.norm == "group" else None)
        activations = ACTIVATIONS[activation_of(config)](activations)
        if (index + 1) % cnn.convolutions == 0:
            activations = pooled(activations)
    features = np.moveaxis(activations, -1, 1).reshape(len(images), -1)
    return classified(params["layers"], features, activation_of(config))


def residual(resnet: ResNet, params: dict, pixels: np.ndarray) -> np.ndarray:
    """The residual network in NumPy, from images with channels last."""
    activation = ACTIVATIONS[resnet.activation]
    batch, height, width, channels = pixels.shape
    size = resnet.patch
    squares = pixels.reshape(batch, height // size, size, width // size, size, channels).transpose(0, 1, 3, 2, 4, 5)
    activations = convolved(squares.reshape(batch, height // size, width // size, -1), params["stem"])
    for index, block in params["blocks"].items():
        if index and index % resnet.blocks == 0:
            activations = pooled(activations)
        first = activation(normalized(activations, block["norms"][0], resnet.groups))
        second = normalized(convolved(first, block["convolutions"][0]), block["norms"][1], resnet.groups)
        shortcut = convolved(first, block["projection"]) if "projection" in block else activations
        activations = shortcut + convolved(activation(second), block["convolutions"][1])
    features = activation(normalized(activations, params["norm"], resnet.groups)).mean(axis=(1, 2))
    return classified(params["layers"], features)


def with_activation(config: ModelConfig, activation: str) -> ModelConfig:
    return dataclasses.replace(config, network=dataclasses.replace(config.network, activation=activation))


KEY = jax.random.key(0)
COLOR = (9, 6, 3)  # two poolings leave 2 × 1, after an odd side each
KEYS = jax.random.split(jax.random.key(1), 7)


@functools.cache
def compiled_init() -> tuple[Model, Callable[[jax.Array], dict]]:
    """Compile the initial weights of a network with every kind of layer, once: that takes seconds."""
    model = Model(network((12, 12), channels=(20,), hidden=(), norm="group"))
    return model, jax.jit(lambda key: model.init(key=key))


def images_of(shape: tuple[int, ...]) -> np.ndarray:
    return color_split(5, shape=shape[:2]).images if shape == COLOR else random_split(7, shape=shape).images


@pytest.mark.parametrize(
    "config",
    [
        model_config("linear", image_shape=COLOR),
        perceptron(6, 5, 4, dropout=0.5),
        network(COLOR, dropout=0.5),
        network((9, 6, 2), norm="group", convolutions=1, hidden=()),
        with_activation(perceptron(6, 5, image_shape=COLOR), "tanh"),
        with_activation(network(norm="group"), "gelu"),
        with_activation(network(norm="layer", convolutions=1, kernel_size=5), "silu"),
        model_config(SMALL_RESNET, image_shape=(12, 8, 3), normalization=((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))),
        model_config(dataclasses.replace(SMALL_RESNET, patch=1, blocks=2, activation="silu"), image_shape=(5, 6)),
    ],
    ids=[
        "color linear",
        "mlp",
        "color cnn",
        "group, two channels",
        "color mlp tanh",
        "group gelu",
        "layer silu",
        "resnet",
        "gray resnet",
    ],
)
def test_logits_equal_numpy(config: ModelConfig) -> None:
    model, images = Model(config), images_of(config.image_shape)
    params = random_params(model)
    logits = jax.jit(model.apply)(params, images)
    assert logits.shape == (len(images), NUM_CLASSES)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, forward(config, params, images), rtol=1e-4, atol=1e-4)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(Model(config).abstract_params())
    return {jax.tree_util.keystr(key, simple=True, separator="/"): leaf.shape for key, leaf in leaves}


def test_blocks_are_named_by_number_too_with_their_norms() -> None:
    assert shapes(network(norm="group", channels=(4, 6), convolutions=1, kernel_size=5)) == {
        "blocks/0/convolution/kernel": (5, 5, 1, 4),
        "blocks/0/convolution/bias": (4,),
        "blocks/0/norm/scale": (4,),
        "blocks/0/norm/bias": (4,),
        "blocks/1/convolution/kernel": (5, 5, 4, 6),
        "blocks/1/convolution/bias": (6,),
        "blocks/1/norm/scale": (6,),
        "blocks/1/norm/bias": (6,),
        "layers/0/kernel": (6 * 2 * 1, 5),
        "layers/0/bias": (5,),
        "layers/1/kernel": (5, NUM_CLASSES),
        "layers/1/bias": (NUM_CLASSES,),
    }


@pytest.mark.parametrize(
    ("config", "count", "name"),
    [
        (perceptron(256, 128), 235_146, "mlp-256-128"),
        (model_config("linear"), 7_850, "linear"),
        (network(channels=(32, 64), convolutions=1, hidden=(128,)), 421_642, "cnn-32-64+128"),
        (with_activation(perceptron(256, 128), "tanh"), 235_146, "mlp-256-128"),
    ],
    ids=["mlp", "linear", "cnn", "tanh"],
)
def test_number_of_parameters_and_name(config: ModelConfig, count: int, name: str) -> None:
    model = Model(dataclasses.replace(config, image_shape=(28, 28), num_classes=10))
    assert num_parameters(model.abstract_params()) == count
    assert model.config.name == name


def test_initial_weights_are_he_normal_and_biases_zero() -> None:
    model, init = compiled_init()
    params = init(KEY)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, model.abstract_params())
    convolutions = [params["blocks"][index]["convolution"] for index in (0, 1)]
    for layer in (*convolutions, *params["layers"].values()):
        kernel = np.asarray(layer["kernel"], np.float64)
        fan_in = np.prod(kernel.shape[:-1])
        tolerance = 5 * np.sqrt(2 / kernel.size)  # five standard deviations of a sample variance
        assert np.var(kernel) * fan_in / 2 == pytest.approx(1, rel=tolerance)
        assert abs(np.mean(kernel)) < 5 * np.std(kernel) / np.sqrt(kernel.size)
        assert not np.any(layer["bias"])


@pytest.mark.parametrize(
    "config",
    [
        perceptron(50, dropout=0.5),
        network(SHAPE, channels=(8,), convolutions=1, hidden=(50,), dropout=0.5),
    ],
    ids=["mlp", "cnn"],
)
def test_dropout_needs_a_key_and_depends_on_the_example_alone(config: ModelConfig) -> None:
    model, images = Model(config), jnp.asarray(IMAGES)
    params = random_params(model)
    run = jax.jit(lambda key: model.apply(jax.tree.map(jnp.asarray, params), images, key=key))
    whole = forward(config, params, IMAGES)
    mixed = jnp.repeat(KEYS[:1], len(KEYS))
    result, again, elsewhere = run(KEYS), run(KEYS), run(mixed)
    np.testing.assert_array_equal(result, again)
    np.testing.assert_array_equal(result[0], elsewhere[0])
    assert np.all(np.max(np.abs(result - whole), axis=1) > 1e-2), "every example loses something"
    assert np.all(np.any(np.asarray(result)[1:] != np.asarray(elsewhere)[1:], axis=1)), "what, depends on the key"


@pytest.mark.parametrize(("hidden", "count"), [((), 800), ((500,), 500)], ids=["features", "hidden"])
def test_a_cnn_leaves_out_features_and_hidden_units(hidden: tuple[int, ...], count: int) -> None:
    """Where all that goes into the last layer is one, and all its weights too, a logit counts what was kept."""
    model = Model(network(SHAPE, channels=(400,), convolutions=1, hidden=hidden, dropout=0.5))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), model.abstract_params())
    if hidden:
        params["layers"][0]["kernel"] *= 0
    images = np.zeros((7, *SHAPE), np.uint8)
    logits = np.asarray(jax.jit(lambda params, images: model.apply(params, images, key=KEYS))(params, images))
    remaining = (logits[:, 0] - 1) / 2  # each counts twice, for the same mean; and the bias once
    assert np.all(np.abs(remaining - count / 2) < 5 * np.sqrt(count / 4))
    assert len(set(remaining.tolist())) > 1


def gradient(config: ModelConfig, *, remat: bool) -> CompiledFunction:
    """Compile the gradient of a loss, and the logits beside it, for 64 images."""
    model = Model(config, remat=remat)

    def loss(params: dict, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.apply(params, images)
        return jnp.mean(logits**2), logits

    images = jax.ShapeDtypeStruct((64, *config.image_shape), jnp.uint8)
    return new_compiler().compile("gradient", jax.grad(loss, has_aux=True), model.abstract_params(), images)


def test_rematerialization_gives_the_same_gradients_for_more_work_and_less_memory() -> None:
    config = network((28, 28), channels=(16,), norm="group", groups=4)
    again, remaining = (gradient(config, remat=remat) for remat in (True, False))
    assert 1.2 < again.cost.flops / remaining.cost.flops < 1.5, "a third of the work, the forward pass, is done twice"
    assert again.cost.temporary_bytes < 0.92 * remaining.cost.temporary_bytes
    images = np.random.default_rng(0).integers(0, 256, (64, 28, 28), dtype=np.uint8)
    params = random_params(Model(config))
    for ours, expected in zip(*map(jax.tree.leaves, (again(params, images), remaining(params, images))), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_a_residual_block_begins_as_its_shortcut() -> None:
    model = Model(model_config(SMALL_RESNET, image_shape=(4, 8)))
    params = jax.jit(lambda: model.init(key=KEY))()
    images = random_split(5, shape=(4, 8)).images
    apply = jax.jit(model.apply)
    before = apply(params, images)
    for block in params["blocks"].values():
        block["convolutions"][0] = jax.tree.map(lambda leaf: leaf + 1, block["convolutions"][0])
    np.testing.assert_array_equal(apply(params, images), before)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (1, "resnet.channels: 4 stages, .* leave nothing of 9 × 6 pixels with resnet.patch 1"),
        (4, "resnet.patch must divide the sides of the images, 9 × 6 pixels, got 4"),
    ],
)
def test_images_that_a_resnet_cannot_halve_are_refused(patch: int, message: str) -> None:
    resnet = dataclasses.replace(SMALL_RESNET, patch=patch, channels=(4, 4, 4, 4))
    with pytest.raises(ConfigError, match=f"^{message}"):
        Model(model_config(resnet, image_shape=(9, 6)))


@pytest.mark.parametrize(("image_shape", "stacks"), [((9, 3), 2), ((1, 8), 1)])
def test_more_stacks_than_the_image_can_be_halved_are_refused(image_shape: tuple[int, int], stacks: int) -> None:
    halved = f"^cnn.channels: {stacks} stacks, .* leave nothing of {image_shape[0]} × {image_shape[1]} pixels"
    with pytest.raises(ConfigError, match=halved):
        Model(network(image_shape, channels=(4,) * stacks))


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(128, 32), (100, 25), (31, 31), (64, 32), (96, 32), (37, 37), (127, 127), (1, 1)],
    ids=str,
)
def test_a_tile_is_the_largest_divisor_whose_patches_stay_in_the_cache(num_rows: int, expected: int) -> None:
    """Of 32 channels of 14 × 14 pixels, 37 examples; a prime number of rows is worked whole, not one by one."""
    config = network((28, 28), channels=(32, 64), kernel_size=3, convolutions=1)
    assert config.network.largest_patches((28, 28)) == 9 * 32 * 14 * 14
    assert Model(config).tile_size(num_rows) == expected


def test_largest_patches_count_stacked_convolutions_and_dense_networks_are_not_tiled() -> None:
    cnn = dataclasses.replace(SMALL_CNN, channels=(32, 64), kernel_size=3, convolutions=2)
    assert cnn.largest_patches((28, 28)) == 9 * 32 * 28 * 28
    assert Model(perceptron(16)).tile_size(4096) == 4096
    large = network((256, 256), channels=(64,), kernel_size=5, convolutions=2)
    assert Model(large).tile_size(8) == 1, "one example alone has more"
