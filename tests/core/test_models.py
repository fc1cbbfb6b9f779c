"""The networks: shapes, initial weights, and the function they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import NUM_CLASSES, SHAPE, model_config, random_split

from gradtrail.core.models import MLPConfig, Model, num_parameters

KEY = jax.random.key(0)
IMAGES = random_split(7).images
LINEAR = {"kind": "linear", "mlp": None}


def initial(model: Model) -> dict:
    return jax.jit(lambda key: model.init(key=key))(KEY)


def flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1) / 255.0


def forward(params: dict, images: np.ndarray) -> np.ndarray:
    """The network in NumPy, float64."""
    layers = [params["layers"][index] for index in sorted(params["layers"])]
    activations = flat(images)
    for index, layer in enumerate(layers):
        activations = activations @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)
        if index < len(layers) - 1:
            activations = np.maximum(activations, 0)
    return activations


def shifted(params: dict) -> dict:
    """Return parameters with biases that are not zero, so that a bias left out shows."""
    return jax.tree.map(lambda leaf: leaf + 0.1 * jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), params)


@pytest.mark.parametrize(
    "config", [model_config(**LINEAR), model_config(), model_config(mlp=MLPConfig(hidden=(6, 5, 4)))]
)
def test_logits_equal_numpy(config) -> None:
    model = Model(config)
    params = shifted(initial(model))
    logits = jax.jit(model.apply)(params, jnp.asarray(IMAGES))
    assert logits.shape == (7, NUM_CLASSES)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, forward(params, IMAGES), rtol=1e-5, atol=1e-4)


def test_bytes_and_scaled_floats_give_the_same_logits() -> None:
    model = Model(model_config())
    params = initial(model)
    scaled = jnp.asarray(IMAGES.astype(np.float32) / np.float32(255))
    np.testing.assert_allclose(
        model.apply(params, jnp.asarray(IMAGES)), model.apply(params, scaled), rtol=1e-5, atol=1e-6
    )


def test_layers_are_named_by_number_from_the_input_on() -> None:
    params = Model(model_config(mlp=MLPConfig(hidden=(6, 5)))).abstract_params()
    shapes = {
        jax.tree_util.keystr(key, simple=True, separator="/"): x.shape for key, x in jax.tree.leaves_with_path(params)
    }
    assert shapes == {
        "layers/0/kernel": (SHAPE[0] * SHAPE[1], 6),
        "layers/0/bias": (6,),
        "layers/1/kernel": (6, 5),
        "layers/1/bias": (5,),
        "layers/2/kernel": (5, NUM_CLASSES),
        "layers/2/bias": (NUM_CLASSES,),
    }


@pytest.mark.parametrize(
    ("overrides", "count", "name"),
    [({"mlp": MLPConfig(hidden=(256, 128))}, 235_146, "mlp-256-128"), (LINEAR, 7_850, "linear")],
)
def test_number_of_parameters_and_name(overrides: dict, count: int, name: str) -> None:
    model = Model(model_config(image_shape=(28, 28), num_classes=10, **overrides))
    assert num_parameters(model.abstract_params()) == num_parameters(initial(model)) == count
    assert model.config.name == name


def test_initial_weights_are_he_normal_and_biases_zero() -> None:
    params = initial(Model(model_config(image_shape=(28, 28), mlp=MLPConfig(hidden=(256, 128)))))
    for index, fan_in in enumerate((784, 256)):
        layer = params["layers"][index]
        kernel = np.asarray(layer["kernel"], np.float64)
        tolerance = 5 * np.sqrt(2 / kernel.size)  # five standard deviations of a sample variance
        assert np.var(kernel) * fan_in / 2 == pytest.approx(1, rel=tolerance)
        assert abs(np.mean(kernel)) < 5 * np.std(kernel) / np.sqrt(kernel.size)
        assert not np.any(layer["bias"])


def test_initial_weights_are_those_of_the_key() -> None:
    model = Model(model_config())
    first, again, other = (model.init(key=jax.random.key(seed)) for seed in (0, 0, 1))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert not np.array_equal(first["layers"][0]["kernel"], other["layers"][0]["kernel"])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_parameters_are_float32_in_every_precision(precision: str) -> None:
    model = Model(model_config(precision=precision))
    params = initial(model)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(model.apply(p, jnp.asarray(IMAGES)))))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads, model.abstract_params()))} == {np.dtype("float32")}


def test_bfloat16_logits_are_float32_and_close() -> None:
    params = initial(Model(model_config()))
    exact, low = (
        np.asarray(Model(model_config(precision=precision)).apply(params, jnp.asarray(IMAGES)))
        for precision in ("float32", "bfloat16")
    )
    assert low.dtype == np.float32
    assert not np.array_equal(exact, low)
    np.testing.assert_allclose(exact, low, atol=0.02 * np.abs(exact).max())


@pytest.mark.parametrize("hidden", [(), (0,), (5, -1)])
def test_a_network_without_hidden_units_is_refused(hidden: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^hidden"):
        MLPConfig(hidden=hidden)
