"""Predictions are the same whatever the batches; validation is their plain mean."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from factories import initial_params, model_config, new_compiler, random_split

from gradtrail.core import batching
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model

SPLIT = random_split(23)
MODEL = Model(model_config())
PARAMS = initial_params(MODEL)
LOGITS = np.asarray(MODEL.apply(PARAMS, jnp.asarray(SPLIT.images)), np.float64)


@pytest.fixture(scope="module", params=[1, 8, 1000])
def rows(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    predict = inference.compile_predict(MODEL, request.param, compiler=new_compiler())
    call = functools.partial(predict, PARAMS)
    return batching.join(list(batching.map_batches(call, request.param, SPLIT.images, SPLIT.labels)))


def test_rows_equal_scipy(rows: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(rows["logits"], LOGITS, rtol=1e-4, atol=1e-6)
    losses = -scipy.special.log_softmax(LOGITS, axis=1)[np.arange(23), SPLIT.labels]
    np.testing.assert_allclose(rows["loss"], losses, rtol=1e-4)
    np.testing.assert_array_equal(rows["correct"], LOGITS.argmax(axis=1) == SPLIT.labels)


def test_validation_is_the_mean_over_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "VALIDATION_BATCH_SIZE", 8)  # three batches, the last one of 7 rows
    predict = inference.compile_predict(MODEL, 8, compiler=new_compiler())
    result = inference.validate(predict, PARAMS, SPLIT.images, SPLIT.labels)
    losses = -scipy.special.log_softmax(LOGITS, axis=1)[np.arange(23), SPLIT.labels]
    expected = {"loss": losses.mean(), "accuracy": np.mean(LOGITS.argmax(axis=1) == SPLIT.labels)}
    assert result == pytest.approx(expected, rel=1e-5)
