"""The request of a job: experiments of one commit, and the addresses of code, files and runs. It holds no secrets."""

import dataclasses
import json
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradtrail.stages.common.params import VERSIONS, as_options, read_yaml, validate
from gradtrail.support.errors import UserError

_MORE_PACKAGES = ("dvc", "mlflow")  # packages besides those of pipeline/versions.yaml that must be the same everywhere


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment of DVC."""

    label: str  # name in messages
    name: str  # name in DVC; the same for the same commit, params and stage
    changes: dict[str, Any]  # changes to the params, dotted key → value
    stage: str  # last stage to run
    shared: tuple[str, ...]  # keys of the states before the last one that other experiments may need; see `plan.py`

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def options(self) -> list[str]:
        """The changes as options of `dvc exp run`."""
        return as_options(self.changes)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Experiments of one commit, their resources, and the addresses of code, files and runs."""

    git_url: str  # address of the git repository that has the commit, and gets the experiments' refs
    commit: str
    tracking_uri: str  # address of MLflow's store
    cache: str | None  # folder of a DVC cache that all nodes share; None if files go through the DVC remote
    cpus: float  # CPUs per experiment
    gpus: float  # GPUs per experiment
    python: str  # version of Python, such as `3.11`
    packages: dict[str, str]  # package → version, which must be the same on each node
    experiments: tuple[Experiment, ...]  # with distinct names

    def write(self, path: Path) -> None:
        """Write the request as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), sort_keys=True), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Request":
        """Read a request; raise UserError if another version of this project wrote it."""
        return validate(json.loads(path.read_text(encoding="utf-8")), cls, path.name)


def own_python() -> str:
    """Return the version of this Python, such as `3.11`."""
    return ".".join(platform.python_version_tuple()[:2])


def own_packages() -> dict[str, str]:
    """Return the installed versions of the packages that must be the same everywhere."""
    return {name: _version(name) for name in (*read_yaml(VERSIONS), *_MORE_PACKAGES)}


def require_same_versions(request: Request, node: str) -> None:
    """Raise UserError if Python or a package has another version here than on the machine of the request."""
    if own_python() != request.python:
        raise UserError(
            f"{node}: Python {own_python()}, but the request needs {request.python}: use one image for both"
        )
    for name, expected in request.packages.items():
        if (installed := _version(name)) != expected:
            message = f"{name} {installed or 'is not installed'}, but the request needs {expected}"
            raise UserError(f"{node}: {message}: use one lock")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
