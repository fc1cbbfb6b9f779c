"""The request of a job: planned experiments of one commit, and where code, files and runs are. It holds no secrets.

All checks come before anything is sent: uncommitted changes, a commit that the git remote lacks, a DVC remote that is
not in the commit, a tracking server that other machines cannot reach, passwords in addresses.
"""

import configparser
import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradtrail.stages.common.dvc_cache import cache_folder, require_copies
from gradtrail.stages.common.params import changed, validate
from gradtrail.stages.common.pipeline_file import read_pipeline, sha256_of, stages_before
from gradtrail.stages.common.versions import VERSIONS
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError, has_password
from gradtrail.support.git import CommandError, git, head_commit, strict_git
from gradtrail.support.paths import SQLITE, root, store_uri
from gradtrail.tracking.state import PlannedStages

REQUEST = "request.json"  # file of the job with its request
SOME_FAILED = 3  # exit status of a job in which experiments failed; 1 is that of any Python program that crashes
FAILED = "failed: "  # stands between the label of an experiment and the reason in a job's log

_ALWAYS_READ = ("dvc.yaml", "dvc.lock", ".dvc/config", "src", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Places:
    """The commit of the experiments, and the addresses of code, files and runs."""

    commit: str  # hash of the commit
    git_url: str  # address of the repository that has the commit, and gets the experiments' refs
    tracking_uri: str  # address of MLflow's store
    cache: str | None  # DVC's cache if all workers share it; None if files go through the DVC remote


@dataclass(frozen=True, kw_only=True)
class PlannedExperiment:
    """An experiment of DVC that a job is to run.

    Its name is a digest of the commit, the stage, and all params that the stages up to it read. The same experiment
    thus has the same name on every machine, and its ref exists once in the git repository.
    """

    label: str  # name in messages
    ref: str  # ref in git by which DVC knows the experiment
    changes: dict[str, Any]  # changes to the params, dotted key → value
    stage: str  # last stage to run
    shared: tuple[str, ...]  # keys of states before the last one that the commit's params do not lead to


@dataclass(frozen=True, kw_only=True)
class Request:
    """Experiments of one commit, and what they need."""

    places: Places
    cpus: float  # CPUs per experiment
    gpus: float  # GPUs per experiment
    versions: dict[str, str]  # of packages; they must be the same on each node, and Ray compares Python's
    experiments: tuple[PlannedExperiment, ...]  # with distinct refs

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
    return {name: _version(name) for name in (*read_yaml(VERSIONS), "dvc", "mlflow")}


def plan_experiments(changes: Mapping[str, Mapping[str, Any]], stage: str, commit: str) -> list[PlannedExperiment]:
    """Return the experiments (label → changes to the params) of the working folder's commit, without repeats."""
    stages = PlannedStages()
    chain = [*stages_before(stage, stages.pipeline), stage]

    def keys(params: Mapping[str, Any]) -> list[str]:
        """Return a key for the state of each stage: the digest of what the stages up to it read."""
        read, keys = dict[str, Any](), list[str]()
        for name in chain:
            read[name] = stages.values(name, params)
            keys.append(sha256_of({"commit": commit, "read": read})[:16])
        return keys

    committed = keys(stages.params)
    planned: dict[str, PlannedExperiment] = {}
    for label, own_changes in changes.items():
        own_keys = keys(changed(stages.params, own_changes))
        experiment = PlannedExperiment(
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


def local_places() -> Places:
    """Return the places for experiments on this machine: this repository, its cache and its store."""
    require_copies()
    return Places(
        commit=_clean_commit(),
        git_url=str(Path(git("rev-parse", "--git-common-dir")).resolve()),
        tracking_uri=store_uri(),
        cache=str(cache_folder().resolve()),
    )


def shared_places() -> Places:
    """Return the places that other machines can reach; raise UserError, with the remedy, if something is missing."""
    commit = _clean_commit()
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    remote = git("config", f"branch.{branch}.remote") or "origin"
    if remote not in git("remote").splitlines():
        raise UserError(f"a cluster needs a git remote, and there is no {remote}: `git remote add {remote} URL`")
    url = git("remote", "get-url", remote)
    if has_password(url):
        raise UserError(
            f"git remote {remote}: its address holds a password; keep it in a credential helper of each machine"
        )
    if store_uri().startswith(SQLITE):
        raise UserError(
            "MLFLOW_TRACKING_URI: must name a tracking server that the cluster reaches, such as http://HOST:5000"
        )
    config = configparser.ConfigParser(interpolation=None, strict=False)
    config.read(".dvc/config")
    if not config.get("core", "remote", fallback=""):
        raise UserError(
            ".dvc/config: no default remote; `dvc remote add --default storage s3://BUCKET/PATH`, and commit it"
        )
    try:
        strict_git("fetch", "--quiet", remote, folder=root())
    except CommandError as error:
        raise UserError(f"git remote {remote}: {error}") from None
    if not git("for-each-ref", "--contains", commit, "--count=1", f"refs/remotes/{remote}", "refs/tags"):
        raise UserError(f"git remote {remote} has no commit {commit[:12]}: `git push {remote}` first")
    return Places(commit=commit, git_url=url, tracking_uri=store_uri(), cache=None)


def read_refs(url: str, refs: Collection[str]) -> dict[str, str]:
    """Return the values of those refs that exist in the repository at an address."""
    lines = strict_git("ls-remote", url, *refs).splitlines() if refs else []
    values = (line.split(maxsplit=1) for line in lines)
    return {ref: value for value, ref in values if ref in refs}


def _clean_commit() -> str:
    """Return the commit that is checked out; raise UserError if the stages' inputs have uncommitted changes."""
    commit = head_commit()
    if not commit:
        raise UserError("a cluster runs commits: this is no git repository with a commit")
    pipeline = read_pipeline().values()
    made = {out for spec in pipeline for out in spec.outs}
    read = {path for spec in pipeline for path in (*spec.deps, *spec.params)} - made
    paths = sorted(read | {*_ALWAYS_READ})
    status = git("status", "--porcelain", "--untracked-files=all", "--no-renames", "--", *paths)
    if changed := [line.split(maxsplit=1)[1] for line in status.splitlines()]:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UserError(
            f"uncommitted changes in {changed[0]}{more}: a cluster runs commits; commit them, or `git stash` them"
        )
    return commit
