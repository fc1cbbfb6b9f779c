"""The identity of what a stage makes: one key for each distinct state, the same wherever it is computed.

A state is the stage, its command, the params that it reads, the digests of its deps, and the states of the stages
that made them. All but the last stand in `dvc.lock`, in the same form as here, so that a state can be computed from
a live workspace and from a lock file alike.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.params import read_yaml, validate
from gradtrail.support.errors import UserError, one_line

CHILDREN = ("evaluate", "gradients", "profile", "report")  # of a training: their rows hang below its row
_CODE = (".py", ".j2")  # what else a stage reads is data


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What determines a stage's outs.

    Attributes:
        cmd: the command line.
        params: for each params file, key → value; a key names a section or, dotted, a value in one.
        deps: path → digest.
    """

    cmd: str
    params: dict[str, dict[str, Any]]
    deps: dict[str, str]

    @property
    def data(self) -> dict[str, str]:
        """The deps that are no code."""
        return {path: found for path, found in self.deps.items() if not is_code(path)}

    @property
    def code_digest(self) -> str:
        """One digest for all deps that are code."""
        code = {path: found for path, found in self.deps.items() if is_code(path)}
        return _sha256_of(code)


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A stage as `dvc.yaml` declares it; paths are relative to the folder of `dvc.yaml`.

    Attributes:
        params: for each params file, the keys.
        outs: everything that it writes, metrics and plots included.
    """

    cmd: str
    deps: tuple[str, ...]
    params: dict[str, tuple[str, ...]]
    outs: tuple[str, ...]


_Outs = list[str | dict[str, Any]]


@dataclass
class _DeclaredStage:
    """What is read of a stage in `dvc.yaml`."""

    cmd: str | list[str]
    deps: list[str] = field(default_factory=list)
    params: list[str | dict[str, list[str]]] = field(default_factory=list)
    outs: _Outs = field(default_factory=list)
    metrics: _Outs = field(default_factory=list)
    plots: _Outs = field(default_factory=list)


@dataclass
class _DvcYaml:
    stages: dict[str, _DeclaredStage]


@dataclass
class _LockedFile:
    path: str
    md5: str


@dataclass
class _LockedStage:
    """What is read of a stage in `dvc.lock`."""

    cmd: str | list[str]
    deps: list[_LockedFile] = field(default_factory=list)
    params: dict[str, dict[str, Any]] = field(default_factory=dict)
    outs: list[_LockedFile] = field(default_factory=list)


@dataclass
class _DvcLock:
    stages: dict[str, _LockedStage] = field(default_factory=dict)


def read_pipeline(path: Path = Path("dvc.yaml")) -> dict[str, StageSpec]:
    """Read the stages of a `dvc.yaml`, in its order; raise UserError in one line where they are none."""
    content = read_yaml(path)
    validate(content, _DvcYaml, str(path), extra="ignore")
    pipeline = {name: _stage_spec(stage) for name, stage in content["stages"].items()}
    try:
        TopologicalSorter({name: makers(name, pipeline) for name in pipeline}).prepare()
    except CycleError as error:
        raise UserError(f"{path}: stages that wait for each other: {', '.join(error.args[1])}") from None
    return pipeline


def read_lock(path: Path) -> dict[str, Any]:
    """Read the stages of a `dvc.lock`; raise UserError in one line where they are none."""
    content = read_yaml(path)
    validate(content, _DvcLock, str(path), extra="ignore")
    return content.get("stages", {})


def live_entry(spec: StageSpec, folder: Path) -> Entry:
    """Return the entry of a stage from the files in `folder` as they are now.

    Raises:
        FileNotFoundError: a dep is not there.
        UserError: a params file is none, or lacks a key.
    """
    params = {name: _values(folder / name, keys) for name, keys in spec.params.items()}
    return Entry(cmd=spec.cmd, params=params, deps={dep: digest(folder / dep) for dep in spec.deps})


def locked_entry(stage: Mapping[str, Any]) -> Entry:
    """Return the entry of a stage from its section in `dvc.lock`."""
    deps = {dep["path"]: dep["md5"] for dep in stage.get("deps", ())}
    return Entry(cmd=stage["cmd"], params=stage.get("params", {}), deps=deps)


def makers(stage: str, pipeline: Mapping[str, StageSpec]) -> list[str]:
    """Return the stages that make a dep of `stage`, directly, in the pipeline's order."""
    deps = pipeline[stage].deps
    return [name for name, spec in pipeline.items() if any(holds(out, dep) for out in spec.outs for dep in deps)]


def state_key(stage: str, pipeline: Mapping[str, StageSpec], entry_of: Callable[[str], Entry]) -> str:
    """Return the key of a stage's state: sha256, as 64 hexadecimal digits.

    Args:
        stage: name of the stage.
        pipeline: all stages.
        entry_of: gives the entry of a stage, from the workspace or from a lock file.
    """

    @functools.cache
    def key(name: str) -> str:
        entry = entry_of(name)
        made_by = {maker: key(maker) for maker in makers(name, pipeline)}
        content = {"stage": name, "cmd": entry.cmd, "params": entry.params, "deps": entry.deps, "made_by": made_by}
        return _sha256_of(content)

    return key(stage)


def has_shape(section: Mapping[str, Any], spec: StageSpec) -> bool:
    """Whether a section of a `dvc.lock` reads the data and writes the outs that a stage declares; code aside."""
    data = {dep for dep in spec.deps if not is_code(dep)}
    return set(locked_entry(section).data) == data and {out["path"] for out in section["outs"]} == set(spec.outs)


def entry_key(stage: str, entry: Entry) -> str:
    """Return a key of what determines a stage's outs, whichever states of the stages before it led there."""
    return _sha256_of({"stage": stage, "cmd": entry.cmd, "params": entry.params, "deps": entry.deps})


def values_of(content: Mapping[str, Any], keys: tuple[str, ...], name: str) -> dict[str, Any]:
    """Return the values of dotted keys in a params file's content; raise UserError where one is missing.

    Args:
        content: of the file.
        keys: such as `train` or `train.seed`.
        name: of the file.
    """
    try:
        return {key: functools.reduce(lambda node, part: node[part], key.split("."), content) for key in keys}
    except (KeyError, TypeError) as error:
        raise UserError(f"{name}: a key of {', '.join(keys)} is missing ({one_line(error)})") from None


def is_code(dep: str) -> bool:
    """Whether a dep is code or a template, and no data."""
    return dep.endswith(_CODE)


def holds(out: str, dep: str) -> bool:
    """Whether a dep is an out, or lies in it."""
    return dep == out or dep.startswith(f"{out}/")


def _sha256_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _stage_spec(stage: Mapping[str, Any]) -> StageSpec:
    params: dict[str, list[str]] = {}
    for item in stage.get("params", ()):
        named = item if isinstance(item, dict) else {"params.yaml": [item]}
        for name, keys in named.items():
            params.setdefault(name, []).extend(keys)
    outs = [*stage.get("outs", ()), *stage.get("metrics", ()), *stage.get("plots", ())]
    return StageSpec(
        cmd=stage["cmd"],
        deps=tuple(stage.get("deps", ())),
        params={name: tuple(keys) for name, keys in params.items()},
        outs=tuple(name for out in outs for name in (out if isinstance(out, dict) else [out])),
    )


def _values(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """Look up dotted keys in a params file."""
    return values_of(read_yaml(path), keys, str(path))
