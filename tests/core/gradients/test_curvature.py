"""Curvature against the Hessian itself, of a network small enough to have one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import initial_params, model_config, random_split
from jax.flatten_util import ravel_pytree

from gradtrail.core.gradients.diagnostics import hessian_product, largest_eigenvalue
from gradtrail.core.nn.models import Model
from gradtrail.core.per_example.norms import summed_grad

SPLIT = random_split(9)
IMAGES, LABELS = jnp.asarray(SPLIT.images), jnp.asarray(SPLIT.labels)
MASK = jnp.ones(9, bool)


@pytest.mark.parametrize("kind", ["linear", "mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_products_and_the_largest_eigenvalue_are_those_of_the_hessian(kind: str) -> None:
    model = Model(model_config(kind=kind))
    params = initial_params(model)
    flat, unravel = ravel_pytree(params)

    def grad(params: dict) -> dict:
        return summed_grad(model, params, IMAGES, LABELS, MASK, label_smoothing=0.1)

    hessian = np.asarray(jax.jit(jax.jacrev(lambda flat: ravel_pytree(grad(unravel(flat)))[0]))(flat), np.float64)
    direction = np.random.default_rng(1).normal(size=flat.shape).astype(np.float32)
    product = jax.jit(lambda direction: hessian_product(grad, params, direction))
    along = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(product(unravel(direction)))])
    np.testing.assert_allclose(along, hessian @ direction, rtol=1e-3, atol=1e-3)
    eigenvalues = np.linalg.eigvalsh((hessian + hessian.T) / 2)
    largest = eigenvalues[np.argmax(np.abs(eigenvalues))]
    found = largest_eigenvalue(product, params, 60, seed=2)
    assert found == pytest.approx(largest, rel=0.02)
