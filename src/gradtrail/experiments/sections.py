"""The sections of `params.yaml`, and the config class that a stage's script loads each section into.

A script calls `stage.params(TrainConfig)`, or `stage.params(TrainConfig, "train")` for the section of another stage.
The script is parsed, not run, so a new stage's section is validated before DVC starts without being registered.
"""

import ast
import importlib
from pathlib import Path

from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig
from gradtrail.stages.common.params import PARAMS, read_yaml
from gradtrail.stages.common.pipeline_file import read_pipelines
from gradtrail.support.errors import UserError, suggestion

_SHARED = {"environment": EnvironmentConfig, "runtime": RuntimeConfig}  # loaded by every stage, not by its script


def section_configs(folder: Path = Path()) -> dict[str, type]:
    """Return the config class of each section that can be validated before its stages start.

    A section that a stage loads in another way is validated by its stage, when it starts.
    """
    configs: dict[str, type] = {}
    for stage, spec in read_pipelines(folder).items():
        for script in (folder / dep for dep in spec.deps if dep.endswith(".py") and (folder / dep).is_file()):
            configs |= _loaded_by(script, stage)
    return configs | {name: config for name, config in _SHARED.items() if name in _sections_read(folder)}


def require_known_sections(folder: Path = Path()) -> None:
    """Refuse a section of `params.yaml` that no stage reads if its name is similar to one that a stage reads.

    Any other may belong to another pipeline, or to a removed stage.
    """
    sections = _sections_read(folder)
    for section in read_yaml(folder / PARAMS):
        if section not in sections and (near := suggestion(str(section), sorted(sections))):
            raise UserError(f"{PARAMS}: no stage reads the section {str(section)!r}{near}")


def _sections_read(folder: Path) -> set[str]:
    read = {key.split(".")[0] for spec in read_pipelines(folder).values() for key in spec.params.get(str(PARAMS), ())}
    return read | {"runtime"}


def _loaded_by(script: Path, stage: str) -> dict[str, type]:
    """Return the config class of each section, from the calls of `stage.params` in a script."""
    nodes = [*ast.walk(ast.parse(script.read_text(encoding="utf-8"), str(script)))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    modules = {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}
    configs: dict[str, type] = {}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(ast.Name("stage"), "params"), args=[ast.Name(config), *rest]):
                section = rest[0].value if rest and isinstance(rest[0], ast.Constant) else stage
                if config in modules:
                    configs[str(section)] = getattr(importlib.import_module(modules[config]), config)
    return configs
