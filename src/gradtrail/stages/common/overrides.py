"""Changes to `params.yaml`, as recipes and comparisons name them: key → value, such as `train.model` → `cnn`."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradtrail.support.errors import UserError

PARAMS = Path("params.yaml")
SEED = "train.seed"


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested params as one level, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def require_known(params: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> None:
    """Raise UserError where a change is to what is no param; `name` stands before the key."""
    flat = flatten(params)
    for key in changes:
        if key not in flat:
            raise UserError(f"{name}.{key} is no key of {PARAMS}")


def changed(params: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested params with changes, of which each is to a param that there is."""
    result = copy.deepcopy(dict(params))
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = result
        for parent in parents:
            node = node[parent]
        node[last] = value
    return result


def as_options(changes: Mapping[str, Any]) -> list[str]:
    """Return changes as the options of `dvc exp run` that make them."""
    return [part for key, value in changes.items() for part in ("-S", f"{key}={_as_override(value)}")]


def _as_override(value: Any) -> str:
    """Write a value as DVC's `-S` takes it: words as they are, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
