"""The import hook of the tests checks shapes and types of `core`."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from gradtrail.core.nn.losses import cross_entropy
from gradtrail.core.nn.mlp import MLP


def test_a_wrong_shape_or_type_is_an_error() -> None:
    with pytest.raises(TypeCheckError, match="cross_entropy"):
        cross_entropy(jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeCheckError, match="MLP"):
        MLP(hidden=(2.5,), activation="relu", dropout=0.0)
