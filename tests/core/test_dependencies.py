"""`core` runs where five packages are installed, and its import hook checks shapes and types."""

import ast
import sys

import jax
import jax.numpy as jnp
import pytest
from factories import ROOT
from jaxtyping import TypeCheckError

from gradtrail.core.nn.losses import cross_entropy
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.train.loss_scaling import LossScale

ALLOWED = {"jax", "flax", "optax", "numpy", "jaxtyping"}


def test_core_imports_itself_the_standard_library_and_five_packages() -> None:
    result: dict[str, str] = {}
    for path in (ROOT / "src/gradtrail/core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [item.name for item in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{'.' * node.level}{node.module}"]
            result |= {name: path.name for name in names if not f"{name}.".startswith("gradtrail.core.")}
    other_values = {name for name in result if name.partition(".")[0] not in ALLOWED | sys.stdlib_module_names}
    assert {name: result[name] for name in other_values} == {}
    assert {name.partition(".")[0] for name in result} >= ALLOWED


def test_a_wrong_shape_or_type_is_an_error() -> None:
    with pytest.raises(TypeCheckError, match="cross_entropy"):
        cross_entropy(jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeCheckError, match="MLP"):
        MLP(hidden=(2.5,), activation="relu", dropout=0.0)


def test_pytrees_accept_abstract_leaves() -> None:
    scale = LossScale(scale=jnp.float32(1), finite_steps=jnp.int32(0), skipped_steps=jnp.int32(0))
    assert jax.tree.map(jnp.shape, scale).scale == ()
