"""Plans experiments: what each is called, and which of its states others may be making at the same moment.

A name is a digest of commit, stage and all params that the stages up to it read. So the same experiment has the same
name whoever plans it, and a git repository, where a name exists once, decides who makes it.

Experiments may have states in common before their last one, such as a training that is evaluated in two ways. A state
is known by a key before it is made: the digest of the commit and of what all stages up to it read of the params. States
that `dvc.lock` has are no one's to make.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrail.cluster.task.request import Experiment
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.dvc_cache import digest_within
from gradtrail.stages.common.overrides import PARAMS, changed
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import (
    Entry,
    StageSpec,
    contains_path,
    locked_entry,
    read_locks,
    read_pipeline,
    sha256_of,
    stages_before,
    values_of,
)

_DIGITS = 16  # of a digest in a name


@dataclass(frozen=True)
class RequestedExperiment:
    """An experiment as a person asks for it: changes to the params, and the last stage to run."""

    label: str
    changes: dict[str, Any]
    stage: str


def plan_experiments(wanted: Sequence[RequestedExperiment], commit: str) -> list[Experiment]:
    """Return the experiments of the working folder's commit, each once, in their order."""
    planner = _Planner(commit)
    found: dict[str, Experiment] = {}
    for each in wanted:
        experiment = planner.plan(each)
        found.setdefault(experiment.name, experiment)
    return list(found.values())


class _Planner:
    """Plans experiments of a commit, whose files the working folder has."""

    def __init__(self, commit: str):
        self._commit = commit
        self._pipeline = read_pipeline()
        self._locks = read_locks(Path())
        self._params = read_yaml(PARAMS)
        self._digests: dict[str, str] = {}

    def plan(self, wanted: RequestedExperiment) -> Experiment:
        params = changed(self._params, wanted.changes)
        chain = [*stages_before(wanted.stage, self._pipeline), wanted.stage]
        read = {stage: self._values(self._pipeline[stage], params) for stage in chain}
        num_locked = self._num_locked(chain, read)
        keys = [self._key(stage, read) for stage in chain]
        name = f"gradtrail-{keys[-1][:_DIGITS]}"
        shared = tuple(key[: 2 * _DIGITS] for key in keys[num_locked:-1])
        return Experiment(
            label=wanted.label, name=name, changes=dict(wanted.changes), stage=wanted.stage, shared=shared
        )

    def _key(self, stage: str, read: Mapping[str, Any]) -> str:
        before = [*stages_before(stage, self._pipeline), stage]
        return sha256_of({"commit": self._commit, "stage": stage, "read": {name: read[name] for name in before}})

    def _values(self, spec: StageSpec, params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        contents = {name: params if name == str(PARAMS) else read_yaml(Path(name)) for name in spec.params}
        return {name: values_of(contents[name], keys, name) for name, keys in spec.params.items()}

    def _num_locked(self, chain: Sequence[str], read: Mapping[str, Any]) -> int:
        """Return how many stages, from the first on, are as `dvc.lock` has them."""
        outs: dict[str, str] = {}
        for place, stage in enumerate(chain):
            section, spec = self._locks.get(stage), self._pipeline[stage]
            deps = {dep: self._digest(dep, outs) for dep in spec.deps}
            if section is None or locked_entry(section) != Entry(cmd=spec.cmd, params=read[stage], deps=deps):
                return place
            outs |= {out["path"]: out["md5"] for out in section.get("outs", ())}
        return len(chain)

    def _digest(self, dep: str, outs: Mapping[str, str]) -> str:
        """Return the digest of a dep: of an out that the lock names, or else of the file; empty where it is missing."""
        for out, md5 in outs.items():
            if contains_path(out, dep):
                return digest_within(out, md5, dep) or ""
        if dep not in self._digests:
            self._digests[dep] = digest(Path(dep)) if Path(dep).exists() else ""
        return self._digests[dep]
