"""The sum of clipped gradients against its definition, by the gradient of every example."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import per_example_norm
from factories import NUM_CLASSES, SMALL_CNN, SMALL_MIXER, cases, initial_params, model_config

from gradtrail.core.nn import losses
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.nn.precision import Precision
from gradtrail.core.per_example.clipped_sum import Clipping, clipped_grad_sum

NETWORKS = {
    "linear": {"network": "linear"},
    "linear on features": {"network": "linear", "features": "oriented_gradients"},
    "mlp with tanh": {"network": MLP(hidden=(5, 4), activation="tanh", dropout=0.4)},
    "mlp": {"network": MLP(hidden=(5, 4), activation="relu", dropout=0.4)},
    "cnn": {"network": dataclasses.replace(SMALL_CNN, dropout=0.4)},
    "cnn on straightened pixels": {"network": SMALL_CNN, "features": "straightened_pixels"},
    "cnn with group norm": {"network": dataclasses.replace(SMALL_CNN, channels=(4, 32), norm="group")},
    "cnn with layer norm": {"network": dataclasses.replace(SMALL_CNN, convolutions=2, norm="layer")},
    "mixer": {"network": dataclasses.replace(SMALL_MIXER, patch_size=2, blocks=2, dropout=0.4)},
}
SHAPE = (8, 6)  # small enough that the norms of the second stack are those of pairs of pixels, and the first one's not
NUM_EXAMPLES = 5
MASK = np.array([True, True, False, True, True])
FAST = [("mlp", 3), ("cnn with group norm", 1), ("linear on features", 3), ("mixer", 3)]

# The emitters that a training has. XLA's older ones, with which most tests compile (`COMPILE_FAST`), get the gradients
# of a pooled convolution before a group norm wrong by about 1 %, those of `vmap(grad)` too (jaxlib 0.10.2).
jit = functools.partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": True})


@functools.cache
def inputs(copies: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Images and keys of every row, and labels that rows of an example have in common."""
    rng = np.random.default_rng(copies)
    images = rng.uniform(size=(NUM_EXAMPLES * copies, *SHAPE)).astype(np.float32)
    labels = np.repeat(rng.integers(0, NUM_CLASSES, NUM_EXAMPLES), copies).astype(np.int32)
    with jax.ensure_compile_time_eval():
        return jnp.asarray(images), jnp.asarray(labels), jax.random.split(jax.random.key(copies), len(labels))


def grads_of_each(model: Model, params: Params, copies: int) -> Params:
    """The gradient of the mean loss of each example's rows, by `vmap(grad)`."""

    def loss(params: Params, image: jax.Array, label: jax.Array, key: jax.Array) -> jax.Array:
        return losses.cross_entropy(model.apply(params, image, key=key), label, label_smoothing=0.1).mean()

    of_example = [leaf.reshape(NUM_EXAMPLES, copies, *leaf.shape[1:]) for leaf in inputs(copies)]
    return jax.vmap(jax.grad(loss), in_axes=(None, 0, 0, 0))(params, *of_example)


@pytest.mark.parametrize(("network", "copies"), cases(itertools.product(NETWORKS, (1, 3)), fast=FAST))
def test_clipped_sum_equals_the_definition(network: str, copies: int) -> None:
    model = Model(model_config(image_shape=SHAPE, **NETWORKS[network]))
    params = initial_params(model)
    item = jit(functools.partial(grads_of_each, model, copies=copies))(params)
    norms = np.asarray(per_example_norm(item))
    limit = float(np.median(norms))  # some are clipped, some are not
    images, labels, keys = inputs(copies)
    clipping = Clipping(norm=limit, copies=copies, label_smoothing=0.1)
    result = jit(lambda p: clipped_grad_sum(model, p, images, labels, jnp.asarray(MASK), clipping, key=keys))(params)
    np.testing.assert_allclose(result.norms, norms, rtol=5e-4)  # upper bounds
    factors = np.where(MASK, np.minimum(1.0, limit / np.asarray(result.norms)), 0.0)
    expected = jax.tree.map(lambda leaf: np.tensordot(factors, np.asarray(leaf, np.float64), 1), item)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6 * largest)
    jax.tree.map(close, result.grads, expected)


@pytest.mark.parametrize(
    ("network", "precision"),
    cases(
        itertools.product(("mlp", "cnn with group norm", "mixer"), ("float32", "bfloat16")),
        fast=[("mlp", "bfloat16"), ("cnn with group norm", "float32")],
    ),
)
def test_no_example_counts_for_more_than_the_clip_norm(network: str, precision: Precision) -> None:
    """Rounding of the scaled cotangents to a low precision included."""
    model = Model(model_config(image_shape=SHAPE, precision=precision, **NETWORKS[network]))
    params = initial_params(model)
    images, labels, _ = inputs(1)
    clipping = Clipping(norm=1e-3, copies=1, label_smoothing=0.0)

    @jit
    def norm_of_one(only: jax.Array) -> jax.Array:
        result = clipped_grad_sum(model, params, images, labels, jnp.arange(NUM_EXAMPLES) == only, clipping)
        return jnp.stack([jnp.sum(leaf**2) for leaf in jax.tree.leaves(result.grads)])

    norms = [np.sqrt(np.sum(np.asarray(norm_of_one(index), np.float64))) for index in range(NUM_EXAMPLES)]
    assert max(norms) <= 1e-3
    assert min(norms) > 0.98e-3


@pytest.mark.parametrize(
    ("network", "copies"),
    cases(
        itertools.product(("mlp", "mlp with tanh", "cnn with group norm", "cnn with layer norm", "mixer"), (1, 3)),
        fast=[("mlp", 3), ("cnn with group norm", 1)],
    ),
)
def test_example_that_overflows_adds_at_most_the_clip_norm_and_spares_the_others(network: str, copies: int) -> None:
    """Weights of 1e38 make the first example overflow; the others are black."""
    model = Model(model_config(image_shape=SHAPE, **NETWORKS[network]))
    params = jax.tree.map(lambda leaf: leaf * 1e38, initial_params(model))
    images, labels, keys = inputs(copies)
    images = images.at[copies:].set(0.0)
    clipping = Clipping(norm=0.1, copies=copies, label_smoothing=0.0)

    @jit
    def grad_sum(mask: jax.Array) -> Params:
        return clipped_grad_sum(model, params, images, labels, mask, clipping, key=keys).grads

    number = np.arange(NUM_EXAMPLES)
    every, first, other_values = (grad_sum(mask) for mask in (number >= 0, number == 0, number > 0))
    assert sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in jax.tree.leaves(first)) <= 0.1**2
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda total, one, rest: close(total, one + rest), every, first, other_values)
    unclipped = grads_of_each(model, params, copies)
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(unclipped))
