"""Reading `dvc.yaml` and `dvc.lock`: the stages, and what determines the outputs of each.

The one place that knows the names, the order, the deps, params and outputs of the stages. Out of scope: the key of a
state, which `tracking/state.py` makes of an entry.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrail.stages.common.files import digest
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError, one_line

# The pipeline of the root and the optional ones, each with its lock; all paths are relative to the root. `.dvcignore`
# hides the optional ones from DVC until `gradtrail repro` has run them
_FOLDERS = ("", "pipeline/audit/", "pipeline/privacy_audit/", "pipeline/what_if/")
FILES = tuple(f"{folder}{name}" for folder in _FOLDERS for name in ("dvc.yaml", "dvc.lock"))
PARAMS_FILES = tuple(f"{folder}params.yaml" for folder in _FOLDERS)
TRAIN = "train"  # the stage whose run is the parent of the runs below it
_SOURCE_FOLDER, _SOURCE_FILES, _NETWORKS = "src/", (".py", ".j2"), "pipeline/networks"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What determines a stage's outputs."""

    cmd: str  # command line
    params: dict[str, dict[str, Any]]  # params file → key → value; a key names a section or, dotted, a value in one
    deps: dict[str, str]  # path → digest

    @property
    def data(self) -> dict[str, str]:
        return {path: md5 for path, md5 in self.deps.items() if not is_code(path)}


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A stage as `dvc.yaml` declares it; paths are relative to the folder of `dvc.yaml`."""

    cmd: str
    deps: tuple[str, ...]
    params: dict[str, tuple[str, ...]]  # params file → keys
    outs: tuple[str, ...]  # all outputs, metrics and plots included

    @property
    def data_deps(self) -> tuple[str, ...]:
        return tuple(dep for dep in self.deps if not is_code(dep))


def read_pipeline(path: Path = Path("dvc.yaml")) -> dict[str, StageSpec]:
    return parse_pipeline(read_yaml(path), str(path))


def parse_pipeline(content: Mapping[str, Any], name: str) -> dict[str, StageSpec]:
    """Return the stages of a `dvc.yaml`, which messages call `name`, in its order."""
    try:
        return {stage: _stage_spec(section) for stage, section in content["stages"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{name}: no stages as DVC reads them ({type(error).__name__}: {one_line(error)})") from None


def read_pipelines(folder: Path) -> dict[str, StageSpec]:
    """Read the stages of `dvc.yaml` and of the optional pipelines that exist."""
    pipeline = read_pipeline(folder / FILES[0])
    for file in (folder / name for name in FILES[2::2]):
        pipeline |= read_pipeline(file) if file.is_file() else {}
    return pipeline


def dvc_target(stage: str) -> str:
    """Return the target that `dvc repro`, in the root, expects for a stage of the working folder."""
    for file in map(Path, FILES[2::2]):
        if file.is_file() and stage in read_pipeline(file):
            return f"{file}:{stage}"
    return stage


def dvc_file(stage: str) -> str:
    """Return the `dvc.yaml` of the working folder that declares a stage."""
    return dvc_target(stage).rpartition(":")[0] or FILES[0]


def read_locks(folder: Path) -> dict[str, Any]:
    """Read the stages of all locks that exist."""
    locks = [lock for name in FILES[1::2] if (lock := folder / name).is_file()]
    return {name: stage for lock in locks for name, stage in parse_lock(read_yaml(lock), str(lock)).items()}


def parse_lock(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the stages of a `dvc.lock`, which messages call `name`; a commit may hold another project's."""
    stages: dict[str, Any] = content.get("stages", {})
    try:
        for section in stages.values():
            locked_entry(section)
            output_digests(section)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{name}: no stages as DVC locks them ({type(error).__name__}: {one_line(error)})") from None
    return stages


def live_entry(spec: StageSpec, folder: Path, *, is_partial: bool = False) -> Entry:
    """Return the entry of a stage from the current files in `folder`; `is_partial` leaves out missing deps.

    Raises:
        FileNotFoundError: a dep is missing.
        UserError: a params file is missing, or lacks a key.
    """
    params = {name: values_of(read_yaml(folder / name), keys, str(folder / name)) for name, keys in spec.params.items()}
    deps = [dep for dep in spec.deps if not is_partial or (folder / dep).exists()]
    return Entry(cmd=spec.cmd, params=params, deps={dep: digest(folder / dep) for dep in deps})


def locked_entry(stage: Mapping[str, Any]) -> Entry:
    """Return the entry of a section of `dvc.lock`."""
    deps = {dep["path"]: dep["md5"] for dep in stage.get("deps", ())}
    return Entry(cmd=stage["cmd"], params=stage.get("params", {}), deps=deps)


def output_digests(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each output in a section of `dvc.lock`, by its path."""
    return {out["path"]: out["md5"] for out in section.get("outs", ())}


def upstream_stages(stage: str, pipeline: Mapping[str, StageSpec]) -> list[str]:
    """Return the stages that make a dep of `stage`, directly, in the pipeline's order."""
    deps = pipeline[stage].deps
    return [
        name for name, spec in pipeline.items() if any(contains_path(out, dep) for out in spec.outs for dep in deps)
    ]


def has_shape(section: Mapping[str, Any], spec: StageSpec) -> bool:
    """Whether a section of a `dvc.lock` reads the data and writes the outputs that a stage declares; code aside."""
    return set(locked_entry(section).data) == set(spec.data_deps) and output_digests(section).keys() == set(spec.outs)


def values_of(content: Mapping[str, Any], keys: tuple[str, ...], name: str) -> dict[str, Any]:
    """Return the values of keys such as `train` or `train.seed` in a params file; raise UserError if one is missing."""
    try:
        return {key: functools.reduce(lambda node, part: node[part], key.split("."), content) for key in keys}
    except (KeyError, TypeError) as error:
        raise UserError(f"{name}: a key of {', '.join(keys)} is missing ({one_line(error)})") from None


def sections_of(params: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sections of all params files, given file → section → value; versions of packages are left out."""
    return {section: value for file in PARAMS_FILES for section, value in params.get(file, {}).items()}


def stages_before(stage: str, pipeline: Mapping[str, StageSpec]) -> dict[str, StageSpec]:
    """Return the stages whose outputs `stage` reads, directly or not, in the pipeline's order."""
    before, waiting = set[str](), [stage]
    while waiting:
        new = set(upstream_stages(waiting.pop(), pipeline)) - before
        before |= new
        waiting += new
    return {name: spec for name, spec in pipeline.items() if name in before}


def is_below_training(stage: str, pipeline: Mapping[str, StageSpec]) -> bool:
    """Whether a stage reads the outputs or the params of the training, directly or through another stage.

    Its runs in MLflow are then children of the training's run.
    """
    specs = {**stages_before(stage, pipeline), stage: pipeline[stage]}
    reads_params = any(TRAIN in spec.params.get("params.yaml", ()) for spec in specs.values())
    return stage != TRAIN and (TRAIN in specs or reads_params)


def is_code(dep: str) -> bool:
    """Whether a dep is code, that of networks of one's own included; all others are data."""
    return is_source(dep) or dep.startswith(_NETWORKS)


def is_source(dep: str) -> bool:
    """Whether a dep is code of the project, which a stage imports once."""
    return dep.startswith(_SOURCE_FOLDER) or dep.endswith(_SOURCE_FILES)


def contains_path(out: str, dep: str) -> bool:
    """Whether a dep is an output, or lies in it."""
    return dep == out or dep.startswith(f"{out}/")


def sha256_of(content: Mapping[str, Any]) -> str:
    """Return the digest of plain values, independent of the order of their keys, as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _stage_spec(stage: Mapping[str, Any]) -> StageSpec:
    params: dict[str, tuple[str, ...]] = {}
    for item in stage.get("params", ()):
        for name, keys in (item if isinstance(item, dict) else {"params.yaml": [item]}).items():
            params[name] = (*params.get(name, ()), *keys)
    outs = [*stage.get("outs", ()), *stage.get("metrics", ()), *stage.get("plots", ())]
    return StageSpec(
        cmd=stage["cmd"],
        deps=tuple(stage.get("deps", ())),
        params=params,
        outs=tuple(name for out in outs for name in (out if isinstance(out, dict) else [out])),
    )
