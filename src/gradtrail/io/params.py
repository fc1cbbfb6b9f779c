"""Loads one section of `params.yaml` into the dataclass that describes it.

Knows no config class: a stage passes its own, so that this module adds nothing to a stage's dependencies.
YAML is read as YAML 1.2, where `1e-3` is a number.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from gradtrail.io.errors import UserError, one_line

Section = TypeVar("Section")

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML 1.2 file whose top level is a mapping; raise UserError in one line where it is not."""
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as YAML: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected sections by name, got {type(content).__name__}")
    return content


def load_section(section: str, into: type[Section], path: Path = Path("params.yaml")) -> Section:
    """Validate a section of the params file.

    Args:
        section: name of a top-level key.
        into: a frozen dataclass whose fields are the section's keys. All are required; unknown keys are refused.
        path: the params file.

    Returns:
        An instance of `into`.

    Raises:
        UserError: one line that names the key, what was found, and what is allowed.
    """
    content = read_yaml(path)
    if section not in content:
        raise UserError(f"{path}: section '{section}' is missing; found {', '.join(map(str, content))}")
    return validate(content[section], into, f"{path}: {section}")


def validate(value: Any, into: type[Section], name: str) -> Section:
    """Validate plain data (from YAML or JSON) against a dataclass; `name` stands before the key in errors."""
    try:
        # By way of JSON, where strictness still takes a list for a tuple; "10" is no number and true is no 1.
        return TypeAdapter(_strict(into)).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        raise UserError(_one_line(error.errors()[0], name)) from None


def _strict(cls: type[Section]) -> type[Section]:
    """Mark `cls` and the dataclasses that it holds for pydantic: exact types, no unknown keys."""
    for field_type in getattr(cls, "__annotations__", {}).values():
        for part in (field_type, *getattr(field_type, "__args__", ())):
            if isinstance(part, type) and hasattr(part, "__dataclass_fields__"):
                _strict(part)
    return with_config(_STRICT)(cls)


def _one_line(error: ErrorDetails, name: str) -> str:
    """Say what is wrong in one line: where, what is allowed, what was found."""
    key = ".".join([name, *(str(part) for part in error["loc"])])
    match error["type"]:
        case "missing":
            return f"{key} is missing"
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"{key} is no known key"
        case "value_error":  # raised by a config's own __post_init__, whose message names the key
            return f"{name}.{error['ctx']['error']}" if not error["loc"] else f"{key}.{error['ctx']['error']}"
    return f"{key}: {error['msg']}, got {error['input']!r}"
