"""The sections of `params.yaml` and of those of the optional pipelines: reading, validating and changing them.

This module knows no config class: each stage passes its own.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gradtrail.core.config import ConfigError
from gradtrail.stages.common.pipeline_file import PARAMS_FILES, sections_of
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
_MAX_LINE = 500  # characters of an error
# A string that Hydra's grammar takes as it is, unless it is one of its words
_PLAIN = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_HYDRA_WORDS = {"true", "false", "null", "inf", "nan"}


def params_file(section: str) -> Path:
    """Return the file of a section; that of an optional pipeline is beside its `dvc.yaml`."""
    file = f"pipeline/{section}/{PARAMS}"
    return Path(file) if file in PARAMS_FILES else PARAMS


def read_params(folder: Path = Path()) -> dict[str, Any]:
    """Read the sections of all params files that exist."""
    return sections_of({file: read_yaml(folder / file) for file in PARAMS_FILES if (folder / file).is_file()})


def load_section(section: str, into: type[Section], path: Path | None = None) -> Section:
    """Validate a section, a top-level key, of a file, by default its params file; see `validate`."""
    path = path or params_file(section)
    content = read_yaml(path)
    if section not in content:
        sections = one_line(", ".join(map(str, content)))[:_MAX_LINE]
        raise UserError(f"{path}: section '{section}' is missing; found {sections}")
    return validate_section(content[section], into, section, path)


def validate_section(value: Any, into: type[Section], section: str, path: Path) -> Section:
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

    A field of several kinds holds the name of one, and each kind with fields has a block of its name beside the field.
    The result holds the config of the chosen kind; the blocks of the others are checked as well.

    Args:
        into: dataclass whose fields are the keys; others are refused.
        name: prefix of the key in errors.

    Raises:
        UserError: one line that names the key, what was found, and what is allowed.
    """
    hints, fields = typing.get_type_hints(into, include_extras=True), dataclasses.fields(into)  # type: ignore[arg-type]
    choices = {key: kinds for key, hint in hints.items() if (kinds := _kinds(hint))}
    blocks = {kind for kinds in choices.values() for kind, cls in kinds.items() if dataclasses.fields(cls)}
    keys = blocks | {field.name for field in fields}
    if not isinstance(value, dict):
        raise UserError(f"{name}: must have keys such as {fields[0].name}, got {value!r}"[:_MAX_LINE])
    for key in value:
        if key not in keys:
            raise UserError(f"{name}.{one_line(key)} is not a known key{suggestion(str(key), keys)}"[:_MAX_LINE])
    values: dict[str, Any] = {}
    for field in fields:
        key = field.name
        if key in choices and key in value:
            values[key] = _of_kind(value, key, choices[key], name)
        elif key in value:
            values[key] = _read(value[key], hints[key], f"{name}.{key}")
        elif field.default is field.default_factory:  # both are missing
            raise UserError(f"{name}.{key} is missing")
    try:
        return into(**values)
    except ValueError as error:
        raise UserError(f"{name}.{error}") from None


def _of_kind(section: Mapping[str, Any], field: str, kinds: Mapping[str, Any], name: str) -> Any:
    """Return the config of the kind that a field names."""
    chosen = _read(section[field], Literal[*kinds], f"{name}.{field}")
    configs = {}
    for kind, cls in kinds.items():
        if not dataclasses.fields(cls):
            configs[kind] = cls()
        elif kind in section and not hasattr(cls, "config_class"):
            configs[kind] = validate(section[kind], cls, f"{name}.{kind}")
        elif kind in section and kind == chosen:
            configs[kind] = _of_file(cls, section[kind], f"{name}.{kind}")
    if chosen not in configs:
        raise UserError(f"{name}.{chosen} is missing")
    return configs[chosen]


def _of_file(kind: Any, block: dict[str, Any], name: str) -> Any:
    """Return a config of a kind whose block names a file; its other keys are the fields of a class in that file.

    Raises:
        UserError: the block or the file is wrong, or the file imports a package whose version is not recorded.
    """
    if not isinstance(block, dict) or "file" not in block:
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


def _read(value: Any, hint: Any, key: str) -> Any:
    """Return the value of a key as an instance of a type; raise UserError if it is none."""
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    if _is_config(hint):
        return validate(value, hint, key)
    if _is_config(item) and isinstance(value, list):
        return tuple(_read(part, item, f"{key}.{place}") for place, part in enumerate(value))
    try:
        # Via JSON, because strict mode then accepts a list as a tuple, but neither "10" nor true as a number
        return _adapter(hint).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        fault, *others = error.errors()
        if others and isinstance(fault["loc"][0], str):  # one of each member of a union, whose name begins the place
            allowed = " or ".join(one["msg"].removeprefix("Input should be ") for one in (fault, *others))
            raise UserError(f"{key}: Input should be {allowed}, got {value!r}"[:_MAX_LINE]) from None
        place = ".".join([key, *map(one_line, fault["loc"])])
        raise UserError(f"{place}: {fault['msg']}, got {fault['input']!r}"[:_MAX_LINE]) from None


@functools.cache  # pydantic takes a millisecond to build one
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def _is_config(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _kinds(hint: Any) -> dict[str, Any]:
    """Return the configs of a union, or of a single kind, by their attribute `kind`; empty for any other type."""
    return {cls.kind: cls for cls in typing.get_args(hint) or (hint,) if hasattr(cls, "kind")}


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


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested params as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def require_known(params: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> None:
    """Raise UserError if a key of `changes` is not a param; `name` says in the message where the key is."""
    flat = flatten(params)
    for key in changes:
        if key not in flat:
            raise UserError(f"{name}: {PARAMS} has no key {key!r}{suggestion(key, flat)}")


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
        params: dotted key → value, as in `params.yaml` or as text; of `train`, all are returned if no model is chosen.
    """
    texts = {key: str(value).lower() for key, value in params.items()}
    kinds = {text for key, text in texts.items() if key.startswith("train.") and key.count(".") == 1}
    # Keys and blocks with an effect in some cases; any other block of `train` has one if a kind of its name is chosen
    cases = {
        "fetch.pictures": texts.get("fetch.dataset") in IMAGE_FILES,
        "train.vary": texts.get("train.members", "1") != "1",
        "train.reduction": texts.get("train.shards", "1") != "1",
        "train.loss_scaling": texts.get("train.precision") == "float16",
        "train.start": texts.get("train.start.weights", "null") not in ("null", "none"),
        "train.privacy": texts.get("train.privacy.enabled") == "true",
        "train.linear": texts.get("train.schedule") == "linear",  # the model `linear` has no params
        **{f"train.{name}": True for name in SHARED_BLOCKS},
    }

    def is_active(key: str) -> bool:
        if key.startswith("train.") and "train.model" not in texts:
            return True
        block = ".".join(key.split(".")[:2])
        return cases.get(block, block == key or not key.startswith("train.") or block.removeprefix("train.") in kinds)

    return {key: value for key, value in params.items() if is_active(key)}
