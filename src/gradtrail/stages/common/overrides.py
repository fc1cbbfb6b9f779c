"""Changes to `params.yaml`: dotted key → value, such as `train.model` → `cnn`."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradtrail.support.errors import UserError, suggestion

PARAMS = Path("params.yaml")
SEED, MEMBERS, VARY = "train.seed", "train.members", "train.vary"


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested params as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def require_known(params: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> None:
    """Raise UserError if a key of `changes` is not a param; `name` is the prefix of the key in the message."""
    flat = flatten(params)
    for key in changes:
        if key not in flat:
            raise UserError(f"{name}.{key} is not a key of {PARAMS}{suggestion(key, flat)}")


def changed(params: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested params with changes to existing keys."""
    result = copy.deepcopy(dict(params))
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = result
        for parent in parents:
            node = node[parent]
        node[last] = value
    return result


def as_options(changes: Mapping[str, Any]) -> list[str]:
    """Return changes as options of `dvc exp run`."""
    return [part for key, value in changes.items() for part in ("-S", f"{key}={_as_override(value)}")]


def _as_override(value: Any) -> str:
    """Format a value for DVC's `-S`: strings as they are, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
