"""Plans experiments: their names, and the states that several of them need.

A name is a digest of commit, stage and all params that the stages up to it read. The same experiment thus has the same
name on every machine, and its ref exists once in the git repository.

Experiments may share states before their last one, such as a training that is evaluated in two ways. A state that does
not exist yet has a key: the digest of the commit and of the params that all stages up to it read. States that
`dvc.lock` records need no key, as nobody has to make them.
"""

from collections.abc import Mapping
from typing import Any

from gradtrail.cluster.request import Experiment
from gradtrail.stages.common.params import changed
from gradtrail.stages.common.pipeline_file import sha256_of, stages_before
from gradtrail.tracking.state import PlannedStages

_DIGITS = 16  # hex digits of the digest in a name


def plan_experiments(changes: Mapping[str, Mapping[str, Any]], stage: str, commit: str) -> list[Experiment]:
    """Return the experiments of the working folder's commit, in their order and without repeats.

    Args:
        changes: Label → changes to the params, dotted key → value.
        stage: Last stage to run.
        commit: Hash of the commit, whose files the working folder has.
    """
    stages = PlannedStages()
    chain = [*stages_before(stage, stages.pipeline), stage]
    planned: dict[str, Experiment] = {}
    for label, own_changes in changes.items():
        params = changed(stages.params, own_changes)
        keys = [_key(stages, name, params, commit) for name in chain]
        name = f"gradtrail-{keys[-1][:_DIGITS]}"
        shared = keys[_num_locked(stages, chain, params) : -1]
        experiment = Experiment(
            label=label,
            name=name,
            changes=dict(own_changes),
            stage=stage,
            shared=tuple(key[: 2 * _DIGITS] for key in shared),
        )
        planned.setdefault(name, experiment)
    return list(planned.values())


def _key(stages: PlannedStages, stage: str, params: Mapping[str, Any], commit: str) -> str:
    chain = [*stages_before(stage, stages.pipeline), stage]
    read = {name: stages.values(name, params) for name in chain}
    return sha256_of({"commit": commit, "stage": stage, "read": read})


def _num_locked(stages: PlannedStages, chain: list[str], params: Mapping[str, Any]) -> int:
    """Return the number of stages, from the first on, that are as `dvc.lock` records them."""
    outs: dict[str, str] = {}
    for number, stage in enumerate(chain):
        locked = stages.locked_outs(stage, stages.entry(stage, params, outs))
        if locked is None:
            return number
        outs |= locked
    return len(chain)
