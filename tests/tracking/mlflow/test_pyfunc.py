"""A served model gives the answers of the network for any number of images, and refuses other input in one line."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import SHAPE, model_config
from mlflow.exceptions import MlflowException

from gradtrail.core.nn.models import Model
from gradtrail.tracking.mlflow.pyfunc import ServedModel

MODEL = Model(model_config())
PARAMS = MODEL.init(key=jax.random.key(0))
SERVED = ServedModel(MODEL, [jax.device_get(PARAMS)])
PIXELS = np.random.default_rng(0).integers(0, 256, (600, *SHAPE), np.uint8)


@pytest.mark.parametrize("count", [0, 1, 3, 255, 256, 257, 600])
def test_any_number_of_images_gets_the_answers_of_the_network(count: int) -> None:
    answer = SERVED.predict(PIXELS[:count])
    assert answer["probabilities"].dtype == np.float32
    np.testing.assert_allclose(answer["probabilities"], expected()[:count], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(answer["label"], answer["probabilities"].argmax(axis=1))


@functools.cache
def expected() -> np.ndarray:
    return np.asarray(jax.nn.softmax(MODEL.apply(PARAMS, jnp.asarray(PIXELS))))


def test_an_ensemble_answers_with_the_mean_of_its_members() -> None:
    members = [MODEL.init(key=jax.random.key(seed)) for seed in range(3)]
    answer = ServedModel(MODEL, jax.device_get(members)).predict(PIXELS[:5])
    own = [np.asarray(jax.nn.softmax(MODEL.apply(params, jnp.asarray(PIXELS[:5])))) for params in members]
    np.testing.assert_allclose(answer["probabilities"], np.mean(own, axis=0), rtol=1e-4, atol=1e-6)
    assert answer["probabilities"].dtype == np.float32
    np.testing.assert_array_equal(answer["label"], np.mean(own, axis=0).argmax(axis=1))


@pytest.mark.parametrize(
    "same",
    [
        PIXELS[:3].astype(np.int64),
        PIXELS[:3].tolist(),
        PIXELS[:3].astype(object),
        PIXELS[:3] / 255,
        (PIXELS[:3] / 255).astype(np.float32),
        (PIXELS[:3] / 255).tolist(),
    ],
)
def test_whole_numbers_and_floats_are_the_same_image(same: Any) -> None:
    np.testing.assert_allclose(SERVED.predict(same)["probabilities"], expected()[:3], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("one", [PIXELS[0], PIXELS[0].tolist(), PIXELS[0] / 255])
def test_a_single_image_is_a_batch_of_one(one: Any) -> None:
    np.testing.assert_allclose(SERVED.predict(one)["probabilities"], expected()[:1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (PIXELS[0, 0], f"shape {SHAPE[1:]}"),
        (PIXELS[0].T[:-1], f"shape {(SHAPE[1] - 1, SHAPE[0])}"),
        (PIXELS[:2, :-1], f"shape (2, {SHAPE[0] - 1}, {SHAPE[1]})"),
        (PIXELS[:2, ..., None], f"shape (2, {SHAPE[0]}, {SHAPE[1]}, 1)"),
        ([[1, 2], [3]], "rows or images of different lengths"),
        (PIXELS[:1].astype(str), "values of type <U3"),
        (PIXELS[:1] > 9, "values of type bool"),
        (np.full((1, *SHAPE), 256), "int64 from 256 to 256"),
        (np.full((1, *SHAPE), -1), "int64 from -1 to -1"),
        (np.full((1, *SHAPE), 255.0), "float64 from 255 to 255"),
        (np.full((1, *SHAPE), np.nan), "float64 from nan to nan"),
        (None, "shape ()"),
    ],
)
def test_other_input_is_refused_in_one_line(data: Any, found: str) -> None:
    with pytest.raises(MlflowException) as caught:
        SERVED.predict(data)
    assert str(caught.value).startswith(f"images: an array (images, {SHAPE[0]}, {SHAPE[1]}) of whole numbers")
    assert str(caught.value).endswith(f"; got {found}")
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"
