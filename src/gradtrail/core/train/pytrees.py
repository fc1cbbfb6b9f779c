"""Objects as flat dicts of named arrays, as checkpoints store them; dots in a name separate levels."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def add_prefix(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Prepend `<prefix>.` to all names."""
    return {f"{prefix}.{name}": value for name, value in arrays.items()}


def strip_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the entries below a prefix, without it: the inverse of `add_prefix`."""
    return {name.removeprefix(f"{prefix}."): value for name, value in arrays.items() if name.startswith(f"{prefix}.")}


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by their number, in four digits."""
    return numbered(jax.tree.leaves(tree))


def numbered(items: list[Any]) -> dict[str, Any]:
    """Return items by their number, in four digits."""
    return {f"{number:04d}": item for number, item in enumerate(items)}
