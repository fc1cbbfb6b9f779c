"""YAML files, read as YAML 1.2, where `1e-3` is a number."""

import copy
import functools
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from gradtrail.support.errors import UserError, one_line

_MAX_LINE = 500  # characters of an error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML 1.2 file whose top level is a mapping; raise UserError, one line, if it is none."""
    try:
        return parse_yaml(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def parse_yaml(data: bytes, name: str) -> dict[str, Any]:
    """Parse the content of a file that messages call `name`, as `read_yaml` does."""
    try:
        content = copy.deepcopy(_parse(data.decode("utf-8")))
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except (YAMLError, ValueError) as error:  # such as a key that occurs twice
        raise UserError(f"{name}: not readable as YAML: {one_line(error)[:_MAX_LINE]}") from None
    if not isinstance(content, dict):
        raise UserError(f"{name}: expected sections by name, got {type(content).__name__}")
    return content


class _Constructor(SafeConstructor):
    """Reads a date as text: YAML 1.2 has no type for it."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


@functools.lru_cache(maxsize=8)  # a sync reads the params of each state
def _parse(text: str) -> Any:
    yaml = YAML(typ="safe")
    yaml.Constructor = _Constructor
    return yaml.load(text)
