"""Per-example gradients against the batch gradient, finite differences and a closed form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from factories import NUM_CLASSES, model_config, no_clock, random_split

from gradtrail.core import batches, losses, per_example_gradients
from gradtrail.core.models import Model

SPLIT = random_split(13)
IMAGES, LABELS = jnp.asarray(SPLIT.images), jnp.asarray(SPLIT.labels)
MLP, LINEAR = Model(model_config()), Model(model_config(kind="linear", mlp=None))
SMOOTHINGS = [0.0, 0.2]


@functools.cache
def params_of(model: Model) -> dict:
    return model.init(key=jax.random.key(0))


def per_example_grads(params: dict, smoothing: float) -> dict:
    function = functools.partial(per_example_gradients.per_example_grads, MLP, label_smoothing=smoothing)
    return jax.jit(function)(params, IMAGES, LABELS)


@functools.cache
def scores(microbatch_size: int, model: Model = MLP, smoothing: float = 0.2) -> dict[str, np.ndarray]:
    score = per_example_gradients.compile_score(model, smoothing, microbatch_size, clock=no_clock)
    call = functools.partial(score, params_of(model))
    return batches.join(list(batches.map_batches(call, microbatch_size, SPLIT.images, SPLIT.labels)))


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_their_mean_is_the_batch_gradient(smoothing: float) -> None:
    def batch_loss(params: dict) -> jax.Array:
        return jnp.mean(losses.cross_entropy(MLP.apply(params, IMAGES), LABELS, label_smoothing=smoothing))

    params = params_of(MLP)
    each = per_example_grads(params, smoothing)
    mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), each)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, mean, jax.jit(jax.grad(batch_loss))(params))


def test_finite_differences_agree() -> None:
    params = params_of(MLP)
    each = per_example_grads(params, 0.2)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)

    def losses_at(step: float) -> np.ndarray:
        moved = jax.tree.map(lambda leaf, towards: leaf + step * towards, params, direction)
        values = losses.cross_entropy(MLP.apply(moved, IMAGES), LABELS, label_smoothing=0.2)
        return np.asarray(values, np.float64)

    slopes = sum(
        np.asarray(grad, np.float64).reshape(13, -1) @ np.asarray(towards, np.float64).ravel()
        for grad, towards in zip(jax.tree.leaves(each), jax.tree.leaves(direction), strict=True)
    )
    np.testing.assert_allclose(slopes, (losses_at(1e-3) - losses_at(-1e-3)) / 2e-3, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_norm_on_softmax_regression_equals_its_closed_form(smoothing: float) -> None:
    found = scores(5, LINEAR, smoothing)
    layer = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params_of(LINEAR)["layers"][0])
    inputs = SPLIT.images.reshape(13, -1) / 255.0
    targets = (1 - smoothing) * np.eye(NUM_CLASSES)[SPLIT.labels] + smoothing / NUM_CLASSES
    error = scipy.special.softmax(inputs @ layer["kernel"] + layer["bias"], axis=1) - targets
    expected = np.linalg.norm(error, axis=1) * np.sqrt(np.sum(inputs**2, axis=1) + 1)
    np.testing.assert_allclose(found["grad_norm"], expected, rtol=1e-4)
    np.testing.assert_allclose(found["input_norm"], np.linalg.norm(inputs, axis=1), rtol=1e-5)


@pytest.mark.parametrize("microbatch_size", [1, 4, 13, 32])
def test_size_of_the_microbatch_does_not_matter(microbatch_size: int) -> None:
    found, expected = scores(microbatch_size), scores(5)
    for name in expected:
        assert found[name].shape == (13,)
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_order_does_not_matter() -> None:
    order = np.random.default_rng(0).permutation(13)
    score = functools.partial(per_example_gradients.score_batch, MLP, label_smoothing=0.2)
    shuffled, straight = jax.jit(score)(params_of(MLP), IMAGES[order], LABELS[order]), scores(5)
    for name in straight:
        np.testing.assert_allclose(shuffled[name], straight[name][order], rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_other_figures_are_those_of_the_losses() -> None:
    found, logits = scores(5), MLP.apply(params_of(MLP), IMAGES)
    expected = {
        "loss": losses.cross_entropy(logits, LABELS, label_smoothing=0.2),
        "el2n": losses.el2n(logits, LABELS),
        "margin": losses.margin(logits, LABELS),
        "predicted": jnp.argmax(logits, axis=1),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    assert found["predicted"].dtype == np.int32


def test_norms_of_low_precision_gradients_accumulate_in_float32() -> None:
    ones = {"kernel": jnp.ones((2, 100, 100), jnp.float32), "bias": jnp.ones((2, 24), jnp.float32)}
    np.testing.assert_allclose(per_example_gradients.per_example_norm(ones), np.full(2, np.sqrt(10_024)), rtol=1e-6)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), ones)
    np.testing.assert_allclose(per_example_gradients.per_example_norm(low), np.full(2, np.sqrt(10_024)), rtol=1e-6)
