"""Layers keep to their precision and clip bound, dropout to its rate; losses against SciPy and finite differences."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx
from jaxtyping import PyTree
from sklearn.utils.class_weight import compute_class_weight

from gradtrail.core.config import ConfigError
from gradtrail.core.nn import losses
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.layers import ROUNDING, Convolution, Dense, GroupNorm, Layer, LayerNorm, dropout

RNG = np.random.default_rng(0)
ACTIVATIONS = RNG.normal(1.0, 2.0, (6, 4, 3, 5)).astype(np.float32)  # channels, height, width, batch
FEATURES = RNG.normal(size=(5, 7)).astype(np.float32)
KEYS = jax.random.split(jax.random.key(0), 200)
drop = jax.jit(dropout, static_argnums=1)


def compiled(layer: nnx.Module, inputs: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(layer.__call__)(inputs))


def filled(make: Callable[[], nnx.Module]) -> nnx.Module:
    """Return a layer with parameters of which none is 0; its own initial ones would take long to compile."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape), jnp.float32), state))


@pytest.mark.parametrize("norm", [GroupNorm(6, 2), LayerNorm(6)], ids=["group", "layer"])
def test_norm_starts_as_identity_and_treats_examples_separately(norm: nnx.Module) -> None:
    np.testing.assert_array_equal(norm.scale[...], np.ones(6))
    np.testing.assert_array_equal(norm.bias[...], np.zeros(6))
    other_values = ACTIVATIONS.copy()
    other_values[..., 1:] = 7.0
    result = compiled(norm, other_values)
    np.testing.assert_array_equal(result[..., 0], compiled(norm, ACTIVATIONS)[..., 0])
    np.testing.assert_allclose(result[..., 1:], 0, atol=1e-3, err_msg="what is constant has no deviation")


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(functools.partial(Dense, 7, 4), FEATURES), (functools.partial(Convolution, 3, 6, 4), ACTIVATIONS)],
    ids=["dense", "convolution"],
)
def test_a_layer_rounds_to_its_precision_and_returns_float32(make: functools.partial, inputs: np.ndarray) -> None:
    low_layer = filled(lambda: make("bfloat16", rngs=nnx.Rngs(0)))
    exact_layer = filled(lambda: make("float32", rngs=nnx.Rngs(0)))
    nnx.update(exact_layer, nnx.state(low_layer))
    low, exact = compiled(low_layer, inputs), compiled(exact_layer, inputs)
    assert low.dtype == np.float32
    assert 2**-14 < np.abs(low - exact).max() / np.abs(exact).max() < 2**-7


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_its_share_and_keeps_the_mean(rate: float) -> None:
    result = np.asarray(drop(jnp.ones((200, 300)), rate, KEYS))
    deviation = np.sqrt(rate * (1 - rate))
    assert np.mean(result == 0) == pytest.approx(rate, abs=5 * deviation / np.sqrt(result.size))
    np.testing.assert_allclose(result[result != 0], 1 / (1 - rate), rtol=1e-6)
    of_each = np.mean(result == 0, axis=1)
    assert np.all(np.abs(of_each - rate) < 5 * deviation / np.sqrt(300)), "each example loses its share"
    assert len(np.unique(result, axis=0)) == 200, "each loses units of its own"


NUM_EXAMPLES = 16
LAYERS: dict[str, tuple[Callable[[Precision], Layer], tuple[int, ...], tuple[int, ...]]] = {
    "dense": (lambda precision: Dense(20, 6, precision, rngs=nnx.Rngs(0)), (20,), (6,)),
    "convolution": (lambda precision: Convolution(3, 8, 16, precision, rngs=nnx.Rngs(0)), (8, 3, 3), (16, 3, 3)),
    "group norm": (lambda _: GroupNorm(6, 2), (6, 4, 4), (6, 4, 4)),
    "layer norm": (lambda _: LayerNorm(6), (6, 4, 4), (6, 4, 4)),
}
PRIVATE_PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


def most_cancelled(layer: Layer, shapes: tuple[tuple[int, ...], ...], copies: int) -> list[np.ndarray]:
    """Inputs and cotangents whose gradients, summed over copies, are smallest for their norms: Adam, in float64."""
    rng = np.random.default_rng(copies)
    rows = NUM_EXAMPLES * copies
    starts = [1 + 0.1 * rng.normal(size=(rows, *shapes[0])), rng.normal(size=(rows, *shapes[1]))]
    graphdef, state = nnx.split(layer)

    def cancellation(values: list[jax.Array], wide: Layer) -> jax.Array:
        inputs, cotangent = (jnp.moveaxis(value, 0, layer.batch_axis) for value in values)
        grads = Layer.grads(wide, inputs, cotangent).reshape(NUM_EXAMPLES, copies, -1).sum(axis=1)
        norms = [jnp.sum(value.reshape(NUM_EXAMPLES, -1) ** 2, axis=1) for value in (grads, *values)]
        return jnp.sum(jnp.log(norms[0] + 1e-30) - jnp.log(norms[1]) - jnp.log(norms[2]))

    with jax.enable_x64(True):

        def ascend(number: jax.Array, carry: tuple) -> tuple:
            values, means, squares = carry
            slopes = jax.grad(cancellation)(values, wide)
            means = [0.9 * mean + 0.1 * slope for mean, slope in zip(means, slopes, strict=True)]
            squares = [0.99 * square + 0.01 * slope**2 for square, slope in zip(squares, slopes, strict=True)]
            step = 0.05 * 0.98**number
            moves = [mean / (jnp.sqrt(square) + 1e-12) for mean, square in zip(means, squares, strict=True)]
            return [value - step * move for value, move in zip(values, moves, strict=True)], means, squares

        wide = nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), state))
        zeros = [np.zeros_like(start) for start in starts]
        result = jax.jit(lambda starts: jax.lax.fori_loop(0, 200, ascend, (starts, zeros, zeros))[0])(starts)
        return [np.moveaxis(np.asarray(value), 0, layer.batch_axis) for value in result]


@pytest.mark.parametrize(("name", "copies"), [("dense", 3), ("convolution", 3), ("group norm", 1), ("layer norm", 3)])
def test_no_gradient_exceeds_its_bound(name: str, copies: int) -> None:
    make, *shapes = LAYERS[name]
    result = most_cancelled(make("float32"), tuple(shapes), copies)
    for precision in PRIVATE_PRECISIONS:

        @jax.jit
        def added(*arrays: jax.Array) -> PyTree:
            layer = make(precision)  # noqa: B023
            inputs, cotangent = (array.astype(precision).astype(jnp.float32) for array in arrays)  # noqa: B023
            squared, terms = layer.clip_terms(inputs, cotangent, copies)
            weights = jnp.diag(1 / jnp.sqrt(squared))  # of each example by itself
            return jax.vmap(lambda row: layer.weighted_grad(terms, row))(weights)

        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(added(*result))]
        norms = np.sqrt(sum(np.sum(leaf.reshape(NUM_EXAMPLES, -1) ** 2, axis=1) for leaf in leaves))
        assert norms.max() <= 1 + 16 * ROUNDING


LOGITS = RNG.normal(0, 3, (8, 5)).astype(np.float32)
LABELS = RNG.integers(0, 5, 8).astype(np.int32)
ONEHOT = np.eye(5)[LABELS]
SMOOTHINGS = [0.0, 0.9]


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_cross_entropy_equals_its_formula_in_float64(smoothing: float) -> None:
    targets = (1 - smoothing) * ONEHOT + smoothing / 5
    expected = -np.sum(targets * scipy.special.log_softmax(LOGITS.astype(np.float64), axis=1), axis=1)
    ours = losses.CrossEntropy(label_smoothing=smoothing).per_example(jnp.asarray(LOGITS), jnp.asarray(LABELS))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_the_gradient_is_softmax_less_target_and_agrees_with_finite_differences(smoothing: float) -> None:
    with jax.enable_x64(True):
        logits, labels = jnp.asarray(LOGITS, jnp.float64), jnp.asarray(LABELS)

        def total(logits: jax.Array) -> jax.Array:
            return jnp.sum(losses.CrossEntropy(label_smoothing=smoothing).per_example(logits, labels))

        gradient = np.asarray(jax.grad(total)(logits))
        direction = jnp.asarray(RNG.normal(size=LOGITS.shape))
        difference = (total(logits + 1e-5 * direction) - total(logits - 1e-5 * direction)) / 2e-5
    np.testing.assert_allclose(np.sum(gradient * np.asarray(direction)), difference, rtol=1e-6)
    targets = (1 - smoothing) * ONEHOT + smoothing / 5
    np.testing.assert_allclose(gradient, scipy.special.softmax(LOGITS, axis=1) - targets, atol=1e-6)


WEIGHTED = (0.5, 2.0, 1.0, 3.0, 0.1)
LOSSES = [
    losses.CrossEntropy(label_smoothing=0.1),
    losses.CrossEntropy(label_smoothing=0.1, class_weights=WEIGHTED),
    losses.Focal(gamma=2.0),
    losses.Focal(gamma=0.5, class_weights=WEIGHTED),
]


@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_focal_loss_equals_its_formula_in_float64(gamma: float) -> None:
    log_p = scipy.special.log_softmax(LOGITS.astype(np.float64), axis=1)[np.arange(8), LABELS]
    expected = -np.array(WEIGHTED)[LABELS] * (1 - np.exp(log_p)) ** gamma * log_p
    loss = losses.Focal(gamma=gamma, class_weights=WEIGHTED)
    np.testing.assert_allclose(loss.per_example(jnp.asarray(LOGITS), jnp.asarray(LABELS)), expected, rtol=1e-4)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_loss_of_each_class_is_that_of_the_class_as_label(loss: losses.Loss) -> None:
    by_class = loss.per_class(jnp.asarray(LOGITS))
    for label in range(5):
        of_label = loss.per_example(jnp.asarray(LOGITS), jnp.full(8, label, jnp.int32))
        np.testing.assert_allclose(by_class[:, label], of_label, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_gradient_of_a_certain_prediction_is_finite(gamma: float) -> None:
    logits = jnp.array([[100.0, 0.0, 0.0], [-100.0, 0.0, 0.0]])
    grads = jax.grad(lambda logits: jnp.sum(losses.Focal(gamma=gamma).per_example(logits, jnp.zeros(2, jnp.int32))))
    np.testing.assert_allclose(grads(logits), [[0, 0, 0], [-1, 0.5, 0.5]], atol=1e-6)


def test_balanced_class_weights_are_those_of_scikit_learn() -> None:
    labels = np.append(LABELS, np.arange(5))
    expected = compute_class_weight("balanced", classes=np.arange(5), y=labels)
    loss = losses.for_labels(losses.Focal(gamma=1.0, class_weights="balanced"), labels, 5)
    np.testing.assert_allclose(loss.class_weights, expected)
    assert losses.for_labels(loss, LABELS, 5) == loss
    assert losses.for_labels(losses.CROSS_ENTROPY, LABELS, 5) == losses.CROSS_ENTROPY
    with pytest.raises(ConfigError, match=r"^train\.focal\.class_weights must have 3 numbers, .* got 5$"):
        losses.for_labels(loss, LABELS, 3)
    with pytest.raises(ValueError, match=r"^class_weights must be above 0 and at most 1,000,000,000, got 0\.0$"):
        losses.CrossEntropy(label_smoothing=0.0, class_weights=(1.0, 0.0))


def test_large_logits_do_not_overflow() -> None:
    logits = jnp.array([[1000.0, 0.0], [-1000.0, 0.0]])
    np.testing.assert_allclose(losses.cross_entropy(logits, jnp.array([1, 0])), [1000.0, 1000.0])


def test_el2n_equals_its_formula() -> None:
    expected = np.linalg.norm(scipy.special.softmax(LOGITS, axis=1) - ONEHOT, axis=1)
    np.testing.assert_allclose(losses.el2n(jnp.asarray(LOGITS), jnp.asarray(LABELS)), expected, rtol=1e-5)


def test_margin_is_the_label_over_the_best_other() -> None:
    expected = [row[label] - max(np.delete(row, label)) for row, label in zip(LOGITS, LABELS, strict=True)]
    np.testing.assert_allclose(losses.margin(jnp.asarray(LOGITS), jnp.asarray(LABELS)), expected, rtol=1e-6)
