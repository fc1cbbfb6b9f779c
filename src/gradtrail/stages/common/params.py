"""The sections of `params.yaml`: reading, validating and changing them.

This module knows no config class: each stage passes its own.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails

from gradtrail.core.config import ConfigError
from gradtrail.stages.common.versions import require_recorded_imports
from gradtrail.stages.common.yaml_file import parse_yaml, read_yaml
from gradtrail.support.errors import UserError, one_line, suggestion
from gradtrail.support.git import blobs
from gradtrail.support.paths import is_copy, root

Section = TypeVar("Section")
Value = TypeVar("Value")

PARAMS = Path("params.yaml")
SEED, MEMBERS, VARY = "train.seed", "train.members", "train.vary"
IMAGE_FILES = ("folder", "csv")  # values of `fetch.dataset` for image files of one's own, which `fetch.pictures` is for
SHARED_BLOCKS = {"augmentation", "changes"}  # the blocks of `train` that every training reads
_NO_BLOCK = "linear"  # the model of this name has no params: the block is the schedule's
_MAX_LINE = 500  # characters of an error
_PLAIN = re.compile(
    r"[A-Za-z_][\w-]*", re.ASCII
)  # a string that Hydra's grammar takes as it is, unless it is one of these
_HYDRA_WORDS = {"true", "false", "null", "inf", "nan"}
_UNKNOWN = "unexpected_keyword_argument"  # type of pydantic's error


def load_section(section: str, into: type[Section], path: Path = PARAMS) -> Section:
    """Validate a section, a top-level key, of the params file; see `validate`."""
    content = read_yaml(path)
    if section not in content:
        sections = one_line(", ".join(map(str, content)))[:_MAX_LINE]
        raise UserError(f"{path}: section '{section}' is missing; found {sections}")
    return validate_section(content[section], into, section, path)


def validate_section(value: Any, into: type[Section], section: str, path: Path = PARAMS) -> Section:
    """Validate a section; an error also says what `-S` set, or what the last commit has instead."""
    try:
        return validate(value, into, f"{path}: {section}")
    except UserError as error:
        raise UserError(f"{error}{_origin(value, section, path)}") from None


def _origin(value: Any, section: str, path: Path) -> str:
    """Return what an experiment in a copy has from `-S`, or else the values of the last commit that differ."""
    before: dict[str, Any] = {}
    with contextlib.suppress(UserError, KeyError):
        # In the working folder, `dvc exp run -S` writes into the person's file, and leaves a wrong value there
        before = read_yaml(root() / path) if is_copy() else parse_yaml(blobs("HEAD", [str(path)])[str(path)], str(path))
    old, new = flatten({section: before.get(section, {})}), flatten({section: value})
    if is_copy():
        return set_by_option(as_overrides({key: new[key] for key in new if key not in old or new[key] != old[key]}))
    changes = as_overrides({key: old[key] for key in old if key not in new or new[key] != old[key]})
    return f"; the last commit has {', '.join(changes)}" if changes else ""


def set_by_option(texts: Sequence[str]) -> str:
    """Return the end of an error about params that `-S` may have set, such as `; -S set train.epochs=ten`."""
    return f"; -S set {', '.join(texts)}" if texts else ""


def validate(value: Any, into: type[Section], name: str) -> Section:
    """Return plain data (from YAML or JSON) as an instance of a dataclass.

    Args:
        into: dataclass whose fields are the keys; all are required, and others are refused.
        name: prefix of the key in errors.

    Raises:
        UserError: one line that names the key, what was found, and what is allowed.
    """
    try:
        # Via JSON, because strict mode then accepts a list as a tuple, but neither "10" nor true as a number.
        adapter = _adapter(into)  # type: ignore[arg-type] # mypy: a type variable is not hashable
        written = adapter.validate_json(json.dumps(value, default=str))
        result: Section = _with_kinds(into, written, name)
        return result
    except ValidationError as error:
        raise UserError(_one_line(error.errors(), value, name)[:_MAX_LINE]) from None


def as_written(config: Any) -> dict[str, Any]:
    """Return the plain data that `validate` reads as this dataclass, without empty tuples that are the default."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default == ():
            continue
        if hasattr(value, "config_class"):
            values |= {field.name: value.kind, value.kind: {"file": value.file, **as_written(value.config)}}
        elif hasattr(value, "kind"):
            values |= {field.name: value.kind} | ({value.kind: as_written(value)} if dataclasses.fields(value) else {})
        else:
            values[field.name] = as_written(value) if dataclasses.is_dataclass(value) else value
    return values


def _kinds(hint: Any) -> dict[str, type]:
    """Return the configs by name that a field may hold; empty if its value is not chosen by name.

    The kinds of a field are the configs, of a union or alone, that have an attribute `kind`. In YAML and JSON the field
    holds the name, and each kind with fields has a block of its name beside it.
    """
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return {part.kind: part for part in parts if hasattr(part, "kind")}


@functools.cache
def _written(cls: Any) -> Any:
    """Return the dataclass of what YAML and JSON hold of `cls`, without its checks across fields."""
    fields: list[Any] = []
    for name, hint in _fields(cls).items():
        kinds = _kinds(hint)
        if kinds:
            fields.append((name, Literal[*kinds]))
            blocks = {kind: config for kind, config in kinds.items() if dataclasses.fields(config)}
            fields += [
                (kind, (dict[str, Any] if hasattr(config, "config_class") else config) | None, None)
                for kind, config in blocks.items()
            ]
        else:
            fields.append((name, _written(hint) if _is_config(hint) else hint))
    has_kinds = [field[:2] for field in fields] != [*_fields(cls).items()]
    return dataclasses.make_dataclass(cls.__name__, fields, kw_only=True) if has_kinds else cls


def _with_kinds(cls: Any, written: Any, name: str) -> Any:
    """Make an instance of `cls` from one of `_written(cls)`."""
    if isinstance(written, cls):
        return written
    values = {}
    for field, hint in _fields(cls).items():
        value, kinds = getattr(written, field), _kinds(hint)
        if kinds:
            block = getattr(written, value) if dataclasses.fields(kinds[value]) else kinds[value]()
            if block is None:
                raise UserError(f"{name}.{value} is missing")
            value = _of_file(kinds[value], block, f"{name}.{value}") if isinstance(block, dict) else block
        values[field] = _with_kinds(hint, value, f"{name}.{field}") if _is_config(hint) else value
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{name}.{error}") from None


def _of_file(kind: Any, block: dict[str, Any], name: str) -> Any:
    """Return a config of a kind whose block names a file; its other keys are the fields of a class in that file.

    Raises:
        UserError: the block or the file is wrong, or the file imports a package whose version is not recorded.
    """
    if "file" not in block:
        raise UserError(f"{name}.file is missing")
    try:
        config_class = kind.config_class(block["file"])
    except ConfigError as error:
        raise UserError(f"{name}.file: {error}") from None
    values = {key: value for key, value in block.items() if key != "file"}
    try:
        config = kind(file=block["file"], config=validate(values, config_class, name))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        fault = one_line(f"{type(error).__name__}: {error}")[:_MAX_LINE]
        raise UserError(
            f"{name}.file: the class {config_class.__name__} of {block['file']}.py fails: {fault}"
        ) from None
    require_recorded_imports(Path(config.path))
    return config


def _is_config(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _fields(cls: type) -> dict[str, Any]:
    """Return the types of the fields by name, bounds included."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache  # pydantic takes milliseconds to build one
def _adapter(into: type) -> TypeAdapter[Any]:
    return TypeAdapter(_strict(_written(into)))


def _strict(cls: Any) -> Any:
    """Configure pydantic for `cls` and the dataclasses in it: exact types, finite numbers."""
    for field_type in getattr(cls, "__annotations__", {}).values():
        for part in (field_type, *getattr(field_type, "__args__", ())):
            if _is_config(part):
                _strict(part)
    return with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))(cls)


def _one_line(errors: list[ErrorDetails], value: Any, name: str) -> str:
    """Format the first error as one line: the key, what is allowed, what was found. Unknown keys go first.

    A key that is mistyped is also missing.
    """
    error = min(errors, key=lambda candidate: candidate["type"] != _UNKNOWN)
    key = ".".join([name, *(one_line(part) for part in error["loc"])])
    match error["type"]:
        case "missing":
            return f"{key} is missing"
        case "unexpected_keyword_argument":
            return f"{key} is not a known key{_nearest_key(error, errors, value)}"
        case "value_error":  # of a config's own checks, whose message names the key
            return f"{name}.{error['ctx']['error']}" if not error["loc"] else f"{key}.{error['ctx']['error']}"
    return f"{key}: {error['msg']}, got {error['input']!r}"


def _nearest_key(error: ErrorDetails, errors: list[ErrorDetails], value: Any) -> str:
    """Suggest a key for an unknown one, out of the known and the missing keys of the same section."""
    *parents, unknown = error["loc"]
    section = functools.reduce(lambda node, part: node[part], parents, value)
    faults = {str(other["loc"][-1]): other["type"] for other in errors if [*other["loc"][:-1]] == parents}
    valid_keys = {key for key in {*map(str, section), *faults} if faults.get(key) != _UNKNOWN}
    return suggestion(str(unknown), valid_keys)


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
    return [part for text in as_overrides(changes) for part in ("-S", text)]


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Return changes as DVC's `-S` takes them, in Hydra's grammar: `key=value`."""
    return [f"{key}={_as_override(value)}" for key, value in changes.items()]


def _as_override(value: Any) -> str:
    """Format a value in Hydra's grammar; a string that it could take for something else is quoted."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_as_override, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _HYDRA_WORDS:
        return value
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # else OmegaConf would look for a variable
    return "'" + re.sub(r"(\\*)('|$)", lambda end: 2 * end[1] + end[2].replace("'", r"\'"), value) + "'"


def active_params(params: Mapping[str, Value]) -> dict[str, Value]:
    """Return the flat params that have an effect, in their order.

    Args:
        params: dotted key → value, as in `params.yaml` or as text; all are returned if no model is chosen.
    """
    if params.get("fetch.dataset") not in IMAGE_FILES:
        params = {key: value for key, value in params.items() if not key.startswith("fetch.pictures.")}
    if "train.model" not in params:
        return dict(params)
    unused = {"train.vary"} if str(params.get("train.members", 1)) == "1" else set()
    unused |= {"train.reduction"} if str(params.get("train.shards", 1)) == "1" else set()
    chosen = {params.get("train.optimizer"), params.get("train.schedule"), params.get("train.loss"), *SHARED_BLOCKS}
    chosen |= {params["train.model"]} - {_NO_BLOCK}
    chosen |= {"loss_scaling"} if params.get("train.precision") == "float16" else set()
    chosen |= {"privacy"} if str(params.get("train.privacy.enabled")).lower() == "true" else set()
    if str(params.get("preprocess.deformations", 1)) == "1":
        unused |= {key for key in params if key.startswith("preprocess.deformation.")}
    in_blocks = (key for key in params if key.startswith("train.") and key.count(".") > 1)
    unused |= {key for key in in_blocks if key.split(".")[1] not in chosen}
    return {key: value for key, value in params.items() if key not in unused}
