"""The import hook checks shapes and types in `core`, but lets JAX rebuild pytrees from anything."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from gradtrail.core.nn.losses import cross_entropy
from gradtrail.core.nn.models import MLPConfig
from gradtrail.core.train.loss_scaling import LossScale


def test_a_wrong_shape_or_type_is_an_error() -> None:
    with pytest.raises(TypeCheckError, match="cross_entropy"):
        cross_entropy(jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeCheckError, match="MLPConfig"):
        MLPConfig(hidden=(2.5,), activation="relu", dropout=0.0)


def test_pytrees_accept_abstract_leaves() -> None:
    scale = LossScale(scale=jnp.float32(1), finite_steps=jnp.int32(0), skipped_steps=jnp.int32(0))
    assert jax.tree.map(jnp.shape, scale).scale == ()
