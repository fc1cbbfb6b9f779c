"""What a job is to make: experiments of one commit, and where files, runs and refs go. Plain values, no secrets."""

import dataclasses
import json
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradtrail.stages.common.overrides import as_options
from gradtrail.stages.common.params import read_yaml, validate
from gradtrail.stages.common.versions import PATH as VERSIONS
from gradtrail.support.errors import UserError

_BESIDE = ("dvc", "mlflow")  # packages that must be the same everywhere beside those of pipeline/versions.yaml


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment of DVC.

    Attributes:
        label: its name in messages.
        name: DVC's name for it; the same for the same commit, params and stage.
        changes: changes to the params, dotted key → value.
        stage: the last stage that it runs.
        shared: keys of states before the last stage's that others may be making too; see `plan.py`.
    """

    label: str
    name: str
    changes: dict[str, Any]
    stage: str
    shared: tuple[str, ...]

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def options(self) -> list[str]:
        """The changes as options of `dvc exp run`."""
        return as_options(self.changes)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Experiments, and where they come from and go to.

    Attributes:
        git_url: address of the git repository that has the commit, and gets the experiments' refs.
        commit: what is run.
        tracking_uri: MLflow's store.
        cache: folder of a DVC cache that all nodes share; None where files go through the DVC remote.
        cpus: of each experiment.
        gpus: of each experiment.
        python: version of Python, such as `3.11`.
        packages: package → version, which must be the same on each node.
        experiments: each with another name.
    """

    git_url: str
    commit: str
    tracking_uri: str
    cache: str | None
    cpus: float
    gpus: float
    python: str
    packages: dict[str, str]
    experiments: tuple[Experiment, ...]

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), sort_keys=True), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Request":
        """Read what `write` wrote; raise UserError where it is of another version of this project."""
        return validate(json.loads(path.read_text(encoding="utf-8")), cls, path.name)


def own_python() -> str:
    """Return the version of this Python, such as `3.11`."""
    return ".".join(platform.python_version_tuple()[:2])


def own_packages() -> dict[str, str]:
    """Return the installed versions of the packages that must be the same everywhere."""
    return {name: _version(name) for name in (*read_yaml(VERSIONS), *_BESIDE)}


def require_same_versions(request: Request, node: str) -> None:
    """Raise UserError where Python or a package has another version here than where the request was made."""
    if own_python() != request.python:
        raise UserError(
            f"{node}: Python {own_python()}, but {request.python} asked for the experiments: use one image for both"
        )
    for name, wanted in request.packages.items():
        if (found := _version(name)) != wanted:
            raise UserError(f"{node}: {name} {found or 'is not installed'}, but {wanted} is asked for: use one lock")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
