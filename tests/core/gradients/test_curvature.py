"""Products with the Hessian and its largest eigenvalue, against the whole Hessian in float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import SMALL_CNN, SMALL_RESNET, model_config, new_compiler, params_on_device, random_split
from jax.flatten_util import ravel_pytree

from gradtrail.core.gradients import curvature
from gradtrail.core.gradients.passes import compile_passes
from gradtrail.core.nn.losses import CrossEntropy
from gradtrail.core.nn.models import Model

LOSS = CrossEntropy(label_smoothing=0.1)
NETWORKS = {"mlp": "mlp", "cnn": SMALL_CNN, "resnet": dataclasses.replace(SMALL_RESNET, patch=1)}
SPLIT = random_split(10)


@functools.cache
def hessian(network: str) -> np.ndarray:
    """The Hessian of the mean loss, float64."""
    model = Model(model_config(NETWORKS[network]))
    flat, unravel = ravel_pytree(params_on_device(model))
    with jax.enable_x64(True):
        pixels, labels = jnp.asarray(SPLIT.images / 255.0), jnp.asarray(SPLIT.labels)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), unravel(flat))
        vector, unravel = ravel_pytree(wide)

        def mean_loss(vector: jax.Array) -> jax.Array:
            return jnp.mean(LOSS.per_example(model.apply(unravel(vector), pixels), labels))

        return np.asarray(jax.jit(jax.jacrev(jax.grad(mean_loss)))(vector))


@pytest.mark.parametrize(("network", "largest"), [("mlp", 512), ("mlp", 4), ("cnn", 512), ("resnet", 4)])
def test_sharpness_is_the_largest_eigenvalue_of_the_hessian(
    network: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradtrail.core.gradients.passes._LARGEST_BATCH", {"cpu": largest})
    model = Model(model_config(NETWORKS[network], precision="bfloat16"))  # is ignored: the Hessian is that of float32
    passes = compile_passes(model, LOSS, compiler=new_compiler())
    found = curvature.sharpness(passes.hessian, params_on_device(model), SPLIT)
    expected = np.linalg.eigvalsh(hessian(network))[-1]
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("size", [1, 2, 40])
def test_lanczos_agrees_with_the_eigenvalues_of_a_matrix(size: int) -> None:
    rng = np.random.default_rng(size)
    matrix = rng.normal(size=(size, size))
    matrix = matrix + matrix.T - 5 * np.eye(size)
    found = curvature.largest_eigenvalue(lambda vector: matrix @ vector, size, 60, seed=0)
    assert found == pytest.approx(np.linalg.eigvalsh(matrix)[-1], rel=1e-9)


def test_eigenvalue_of_little_rank_is_exact_and_of_what_is_not_finite_unknown() -> None:
    assert curvature.largest_eigenvalue(lambda vector: 3 * vector, 50, 12, seed=0) == pytest.approx(3)
    assert curvature.largest_eigenvalue(lambda vector: 0 * vector, 50, 12, seed=0) == 0
    assert math.isnan(curvature.largest_eigenvalue(lambda vector: vector * np.nan, 50, 12, seed=0))
