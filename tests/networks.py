"""Networks to try, with parameters of which none is 0, and the function that they compute, in NumPy and float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from factories import CNN, model_config, random_split

from gradtrail.core.nn.features import oriented_gradients, straightened
from gradtrail.core.nn.models import CNNConfig, MLPConfig, Model, ModelConfig

IMAGES = random_split(7).images


def perceptron(*hidden: int, dropout: float = 0.0, **overrides: Any) -> ModelConfig:
    return model_config(mlp=MLPConfig(hidden=hidden, activation="relu", dropout=dropout), **overrides)


def network(image_shape: tuple[int, int] = (9, 6), **overrides: Any) -> ModelConfig:
    cnn = {"channels": (4, 6), "convolutions": 2, "hidden": (5,)} | overrides
    return model_config(kind="cnn", image_shape=image_shape, cnn=dataclasses.replace(CNN, **cnn))


def drawn(config: ModelConfig) -> dict:
    """Return parameters of which none is 0, so that one left out shows."""
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        fan_in = np.prod(leaf.shape[:-1]) if leaf.ndim > 1 else 2
        return rng.normal(0, np.sqrt(2 / fan_in), leaf.shape).astype(np.float32)

    return jax.tree.map(draw, Model(config).abstract_params())


ACTIVATIONS = {"relu": lambda inputs: np.maximum(inputs, 0), "tanh": np.tanh}


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


def normalized(images: np.ndarray, layer: dict, cnn: CNNConfig) -> np.ndarray:
    grouped = images.reshape(*images.shape[:3], cnn.groups if cnn.norm == "group" else 1, -1)
    axes = (1, 2, 4) if cnn.norm == "group" else (4,)
    mean, variance = (figure(grouped, axis=axes, keepdims=True) for figure in (np.mean, np.var))
    standardized = ((grouped - mean) / np.sqrt(variance + 1e-5)).reshape(images.shape)
    return standardized * np.asarray(layer["scale"]) + np.asarray(layer["bias"])


def pooled(images: np.ndarray) -> np.ndarray:
    batch, height, width, channels = images.shape
    whole = images[:, : height // 2 * 2, : width // 2 * 2]
    return whole.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def forward(config: ModelConfig, params: dict, images: np.ndarray) -> np.ndarray:
    """The whole network in NumPy."""
    if config.cnn is None:
        inputs = oriented(images) if config.features == "oriented_gradients" else seen(config, images)
        return classified(params["layers"], inputs.reshape(len(images), -1), config.activation)
    activations = seen(config, images)[..., None]
    for index in sorted(params["blocks"]):
        block = params["blocks"][index]
        activations = convolved(activations, block["convolution"])
        if config.cnn.norm != "none":
            activations = normalized(activations, block["norm"], config.cnn)
        activations = ACTIVATIONS[config.activation](activations)
        if (index + 1) % config.cnn.convolutions == 0:
            activations = pooled(activations)
    features = np.moveaxis(activations, -1, 1).reshape(len(images), -1)
    return classified(params["layers"], features, config.activation)


def oriented(images: np.ndarray) -> np.ndarray:
    """The features, whose definition has a test of its own."""
    return np.asarray(oriented_gradients(jnp.asarray(images / 255.0, jnp.float32)), np.float64)


def seen(config: ModelConfig, images: np.ndarray) -> np.ndarray:
    """The pixels that a network gets; straightening has a test of its own."""
    if config.features == "none":
        return images / 255.0
    return np.asarray(straightened(jnp.asarray(images / 255.0, jnp.float32)), np.float64)


def with_tanh(config: ModelConfig) -> ModelConfig:
    if config.mlp:
        return dataclasses.replace(config, mlp=dataclasses.replace(config.mlp, activation="tanh"))
    return dataclasses.replace(config, cnn=dataclasses.replace(config.cnn, activation="tanh"))
