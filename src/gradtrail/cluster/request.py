"""The request of a job: planned experiments of one commit, and where code, files and runs are. It holds no secrets."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gradtrail.cluster.places import Places
from gradtrail.stages.common.params import VERSIONS, changed, read_yaml, validate
from gradtrail.stages.common.pipeline_file import sha256_of, stages_before
from gradtrail.support.errors import UserError
from gradtrail.tracking.state import PlannedStages

REQUEST = "request.json"  # file of the job with its request
SOME_FAILED = 3  # exit status of a job in which experiments failed; 1 is that of any Python program that crashes
FAILED = "failed: "  # stands between the label of an experiment and the reason in a job's log

_MORE_PACKAGES = ("dvc", "mlflow")  # packages besides those of pipeline/versions.yaml that must be the same everywhere
_DIGITS = 16  # hex digits of a digest


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment of DVC.

    Its name is a digest of the commit, the stage, and all params that the stages up to it read. The same experiment
    thus has the same name on every machine, and its ref exists once in the git repository.
    """

    label: str  # name in messages
    ref: str  # ref in git by which DVC knows the experiment
    changes: dict[str, Any]  # changes to the params, dotted key → value
    stage: str  # last stage to run
    shared: tuple[str, ...]  # keys of states before the last one that the commit's params do not lead to

    @property
    def name(self) -> str:
        """The name in DVC."""
        return self.ref.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Experiments of one commit, and what they need."""

    places: Places
    cpus: float  # CPUs per experiment
    gpus: float  # GPUs per experiment
    versions: dict[str, str]  # of packages; they must be the same on each node, and Ray compares Python's
    experiments: tuple[Experiment, ...]  # with distinct refs

    def as_json(self) -> str:
        """Return the request as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """Read a request; raise UserError if another version of this project wrote it."""
        return validate(json.loads(text), cls, "request")

    def require_same_versions(self, node: str) -> None:
        """Raise UserError if a package has another version here than on the machine of the request."""
        for name, expected in self.versions.items():
            if (installed := _version(name)) != expected:
                message = f"{node}: {name} {installed or 'is not installed'}, but the request needs {expected}"
                raise UserError(f"{message}: use one lock, or one image, for both")


def own_versions() -> dict[str, str]:
    """Return the versions of the packages that must be the same everywhere."""
    return {name: _version(name) for name in (*read_yaml(VERSIONS), *_MORE_PACKAGES)}


def plan_experiments(changes: Mapping[str, Mapping[str, Any]], stage: str, commit: str) -> list[Experiment]:
    """Return the experiments of the working folder's commit, in their order and without repeats.

    Args:
        changes: Label → changes to the params, dotted key → value.
        stage: Last stage to run.
        commit: Hash of the commit, whose files the working folder has.
    """
    stages = PlannedStages()
    chain = [*stages_before(stage, stages.pipeline), stage]

    def keys(params: Mapping[str, Any]) -> list[str]:
        """Return a key for the state of each stage: the digest of what the stages up to it read."""
        read, keys = dict[str, Any](), list[str]()
        for name in chain:
            read[name] = stages.values(name, params)
            keys.append(sha256_of({"commit": commit, "read": read})[:_DIGITS])
        return keys

    committed = keys(stages.params)
    planned: dict[str, Experiment] = {}
    for label, own_changes in changes.items():
        own_keys = keys(changed(stages.params, own_changes))
        experiment = Experiment(
            label=label,
            ref=f"refs/exps/{commit[:2]}/{commit[2:]}/gradtrail-{own_keys[-1]}",
            changes=dict(own_changes),
            stage=stage,
            shared=tuple(key for key in own_keys[:-1] if key not in committed),
        )
        planned.setdefault(experiment.ref, experiment)
    return list(planned.values())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
