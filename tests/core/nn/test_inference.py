"""Predictions are the same whatever the batches; validation is their plain mean."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import scipy.special
from factories import SMALL_CNN, model_config, new_compiler, params_on_device, random_split

from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model
from gradtrail.core.xla.passes import Pass

SPLIT = random_split(23)
MODEL = Model(model_config())
PARAMS = params_on_device(MODEL)


@functools.cache
def logits() -> np.ndarray:
    return np.asarray(jax.jit(MODEL.apply)(PARAMS, SPLIT.images), np.float64)


@pytest.fixture(scope="module", params=[1, 8, 1000])
def predict(request: pytest.FixtureRequest) -> Pass:
    return inference.compile_predict_within(MODEL, request.param, compiler=new_compiler())


def test_rows_equal_scipy(predict: Pass) -> None:
    rows = predict(PARAMS, SPLIT.images, SPLIT.labels)
    np.testing.assert_allclose(rows["logits"], logits(), rtol=1e-4, atol=1e-6)
    losses = -scipy.special.log_softmax(logits(), axis=1)[np.arange(23), SPLIT.labels]
    np.testing.assert_allclose(rows["loss"], losses, rtol=1e-4)
    np.testing.assert_array_equal(rows["correct"], logits().argmax(axis=1) == SPLIT.labels)


def test_validation_is_the_mean_over_all_examples(predict: Pass) -> None:
    result = inference.validate(predict, PARAMS, SPLIT)
    losses = -scipy.special.log_softmax(logits(), axis=1)[np.arange(23), SPLIT.labels]
    expected = {"loss": losses.mean(), "accuracy": np.mean(logits().argmax(axis=1) == SPLIT.labels)}
    assert result == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("side", "channels"), [(32, (32, 64)), (224, (2,))])
def test_images_of_any_size_are_validated_in_24_mebibytes(side: int, channels: tuple[int, ...]) -> None:
    """More is given back to the system after each call, which takes several times as long."""
    model = Model(model_config(dataclasses.replace(SMALL_CNN, channels=channels), image_shape=(side, side, 3)))
    predict = inference.compile_predict_within(model, compiler=new_compiler())
    assert 2**22 < predict.function.cost.temporary_bytes <= 24 * 2**20
