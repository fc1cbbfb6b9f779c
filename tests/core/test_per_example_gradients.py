"""Per-example gradients against the batch gradient, finite differences and a closed form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from factories import CNN, NUM_CLASSES, model_config, no_clock, random_split
from flax import nnx

from gradtrail.core import batches, losses, per_example_gradients
from gradtrail.core.layers import Convolution, Dense, Layer
from gradtrail.core.models import MLPConfig, Model

SPLIT = random_split(13)
IMAGES, LABELS = jnp.asarray(SPLIT.images), jnp.asarray(SPLIT.labels)
MLP, LINEAR = Model(model_config()), Model(model_config(kind="linear"))
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
    np.testing.assert_allclose(slopes, (losses_at(2e-4) - losses_at(-2e-4)) / 4e-4, rtol=0.02, atol=0.01)


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


NETWORKS = {
    "linear": {"kind": "linear"},
    "mlp": {"kind": "mlp", "mlp": MLPConfig(hidden=(5, 4), dropout=0.4)},
    "cnn": {"kind": "cnn", "cnn": dataclasses.replace(CNN, dropout=0.4)},
    "cnn with group norm": {"kind": "cnn", "cnn": dataclasses.replace(CNN, convolutions=2, norm="group")},
    "cnn with layer norm": {
        "kind": "cnn",
        "cnn": dataclasses.replace(CNN, channels=(16,), kernel_size=5, norm="layer"),
    },
}


@pytest.mark.parametrize(
    ("network", "precision"),
    [
        pytest.param(network, precision, marks=[] if precision == "float32" or "group" in network else pytest.mark.slow)
        for network in NETWORKS
        for precision in ("float32", "bfloat16", "float16")
    ],
)
def test_norms_layer_by_layer_equal_those_of_the_gradients_themselves(network: str, precision: str) -> None:
    """The definition is `vmap(grad)`, each example alone with its own dropout key."""
    model = Model(model_config(precision=precision, **NETWORKS[network]))
    params, keys = params_of(model), jax.random.split(jax.random.key(1), 13)

    def loss(params: dict, image: jax.Array, label: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply(params, image[None], key=key[None])
        return losses.cross_entropy(logits, label[None], label_smoothing=0.2)[0]

    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0, 0)))(params, IMAGES, LABELS, keys)
    function = functools.partial(per_example_gradients.squared_grad_norms, model, label_smoothing=0.2)
    found, logits = jax.jit(lambda params: function(params, IMAGES, LABELS, key=keys))(params)
    assert logits.shape == (13, NUM_CLASSES)
    tolerance = 1e-5 if precision == "float32" else 1e-3
    for name, squared in found.items():
        layer = functools.reduce(lambda tree, part: tree[int(part) if part.isdigit() else part], name.split("/"), each)
        expected = np.square(np.asarray(per_example_gradients.per_example_norm(layer)))
        np.testing.assert_allclose(squared, expected, rtol=tolerance, atol=1e-9, err_msg=name)
    total = np.sqrt(sum(np.asarray(squared) for squared in found.values()))
    np.testing.assert_allclose(total, per_example_gradients.per_example_norm(each), rtol=tolerance)


def test_no_gradient_of_a_dense_layer_is_formed() -> None:
    """Of the MLP, the scores take less than twice the work of a prediction's two passes, whatever the batch."""
    model = Model(model_config(image_shape=(28, 28), mlp=MLPConfig(hidden=(256, 128), dropout=0.0), num_classes=10))
    score = per_example_gradients.compile_score(model, 0.1, 64, clock=no_clock)
    forward = 2 * 64 * (784 * 256 + 256 * 128 + 128 * 10)
    backward = 2 * 64 * (256 * 128 + 128 * 10)
    assert score.cost.flops < 1.2 * (forward + backward)


def test_a_layer_that_knows_no_better_way_is_scored_by_its_gradients() -> None:
    layer = Dense(4, 3, "float32", rngs=nnx.Rngs(0))
    inputs, cotangent = (jax.random.normal(jax.random.key(seed), (5, size)) for seed, size in ((0, 4), (1, 3)))
    np.testing.assert_allclose(
        Layer.squared_grad_norms(layer, inputs, cotangent), layer.squared_grad_norms(inputs, cotangent), rtol=1e-5
    )


def test_the_ghost_norm_of_a_convolution_equals_that_of_its_gradient() -> None:
    """Both ways to the same figure: few pixels and many channels take one, many pixels and few channels the other."""
    for side, channels in ((3, 24), (12, 2)):
        layer = Convolution(3, channels, channels, "float32", rngs=nnx.Rngs(0))
        inputs, cotangent = (jax.random.normal(jax.random.key(s), (channels, side, side, 3)) for s in (0, 1))
        np.testing.assert_allclose(
            layer.squared_grad_norms(inputs, cotangent), Layer.squared_grad_norms(layer, inputs, cotangent), rtol=1e-4
        )


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
