"""Objects as flat dicts of named arrays, as a checkpoint keeps them; a dot in a name leads down."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def add_prefix(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Put a prefix before all names."""
    return {f"{prefix}.{name}": value for name, value in arrays.items()}


def strip_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what has a prefix, without it: what `above` was given."""
    return {name.removeprefix(f"{prefix}."): value for name, value in arrays.items() if name.startswith(f"{prefix}.")}


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by names that sort in their order."""
    return numbered(jax.tree.leaves(tree))


def numbered(items: list[Any]) -> dict[str, Any]:
    """Return items by names that sort in their order."""
    return {f"{number:04d}": item for number, item in enumerate(items)}
