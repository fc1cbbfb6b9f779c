"""Plans experiments: their names, and the states that several of them need.

A name is a digest of commit, stage and all params that the stages up to it read. The same experiment thus has the same
name on every machine, and its ref exists once in the git repository.

Experiments may share states before their last one, such as a training that is evaluated in two ways. A state that does
not exist yet has a key: the digest of the commit and of the params that all stages up to it read. States that
`dvc.lock` records need no key, as nobody has to make them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradtrail.cluster.request import Experiment
from gradtrail.stages.common.params import changed
from gradtrail.stages.common.pipeline_file import sha256_of, stages_before
from gradtrail.tracking.lineage.state import PlannedStages

_DIGITS = 16  # hex digits of the digest in a name


@dataclass(frozen=True)
class RequestedExperiment:
    """A requested experiment: changes to the params, and the last stage to run."""

    label: str
    changes: dict[str, Any]
    stage: str


def plan_experiments(requested: Sequence[RequestedExperiment], commit: str) -> list[Experiment]:
    """Return the experiments of the working folder's commit, in their order and without repeats."""
    planner = _Planner(commit)
    planned: dict[str, Experiment] = {}
    for experiment in map(planner.plan, requested):
        planned.setdefault(experiment.name, experiment)
    return list(planned.values())


class _Planner:
    """Plans experiments of a commit, whose files the working folder has."""

    def __init__(self, commit: str):
        self._commit = commit
        self._stages = PlannedStages()

    def plan(self, requested: RequestedExperiment) -> Experiment:
        params = changed(self._stages.params, requested.changes)
        chain = [*stages_before(requested.stage, self._stages.pipeline), requested.stage]
        keys = [self._key(stage, params) for stage in chain]
        return Experiment(
            label=requested.label,
            name=f"gradtrail-{keys[-1][:_DIGITS]}",
            changes=dict(requested.changes),
            stage=requested.stage,
            shared=tuple(key[: 2 * _DIGITS] for key in keys[self._num_locked(chain, params) : -1]),
        )

    def _key(self, stage: str, params: Mapping[str, Any]) -> str:
        chain = [*stages_before(stage, self._stages.pipeline), stage]
        read = {name: self._stages.values(name, params) for name in chain}
        return sha256_of({"commit": self._commit, "stage": stage, "read": read})

    def _num_locked(self, chain: Sequence[str], params: Mapping[str, Any]) -> int:
        """Return the number of stages, from the first on, that are as `dvc.lock` records them."""
        outs: dict[str, str] = {}
        for number, stage in enumerate(chain):
            locked = self._stages.locked_outs(stage, self._stages.entry(stage, params, outs))
            if locked is None:
                return number
            outs |= locked
        return len(chain)
