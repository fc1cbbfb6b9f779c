"""How long a stage takes: as long as its last run with these params, or as the most similar earlier run.

Only runs on this kind of machine count. Out of scope: scaling the seconds of a run to other params.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mlflow import MlflowClient
from mlflow.entities import Run

from gradtrail.stages.common.params import active_params, flatten
from gradtrail.tracking.artifacts import read_artifact
from gradtrail.tracking.environment import machine_key
from gradtrail.tracking.runs import StoredRuns
from gradtrail.tracking.ship import attempt_file
from gradtrail.tracking.tags import ATTEMPTS, MACHINE, REBUILT, param_text

_DECISIVE = {"fetch.dataset", "train.model"}  # params without which the seconds of a run say nothing
_MOST_KEYS = 3  # differing params that a name lists


class EarlierRun(NamedTuple):
    """An earlier run of a stage."""

    run: Run
    differing: Mapping[str, str]  # its values of the params that differ from the planned ones; empty if none does

    @property
    def differences(self) -> str:
        """The run's values of what differs, such as `train.seed 1`; empty if nothing does."""
        keys = [f"{key} {value}" for key, value in self.differing.items()][:_MOST_KEYS]
        more = [f"{len(self.differing) - _MOST_KEYS} more"] if len(self.differing) > _MOST_KEYS else []
        return ", ".join(keys + more)

    def __str__(self) -> str:
        return " with ".join(filter(None, [self.run.info.run_id[:8], self.differences]))


class Estimate(NamedTuple):
    """What a stage takes, by an earlier run."""

    seconds: float
    peak_bytes: float  # largest resident set; 0 if it is unknown
    earlier: EarlierRun


def by_similarity(runs: Iterable[Run], params: Mapping[str, Any]) -> list[EarlierRun]:
    """Return the runs of a stage, those whose params differ least first, and of these in the given order.

    Args:
        runs: runs of the stage, newest first; left out are rebuilt ones, those on other kinds of machines, and those of
            another model or data set.
        params: content of `params.yaml`.
    """
    own = machine_key()
    planned = active_params({key: param_text(value) for key, value in flatten(params).items()})
    earlier = []
    for run in runs:
        machine = run.data.tags.get(MACHINE)
        # The key of a process without JAX lacks the accelerators
        if machine and (machine.startswith(own) or own.startswith(machine)) and REBUILT not in run.data.tags:
            earlier.append(EarlierRun(run, _differing(run, planned)))
    return sorted((one for one in earlier if _DECISIVE.isdisjoint(one.differing)), key=lambda one: len(one.differing))


def _differing(run: Run, planned: Mapping[str, str]) -> dict[str, str]:
    """Return the run's values of the params of its sections that differ from the planned ones."""
    recorded = active_params(dict(run.data.params))
    sections = {key.partition(".")[0] for key in recorded}
    keys = dict.fromkeys([*recorded, *(key for key in planned if key.partition(".")[0] in sections)])
    return {key: recorded.get(key, "(none)") for key in keys if recorded.get(key) != planned.get(key)}


def estimate(stage: str, params: Mapping[str, Any], client: MlflowClient) -> Estimate | None:
    """Return what the most similar earlier run of a stage took; None if none has timings."""
    for earlier in by_similarity(StoredRuns(client)({"stage": stage}, finished=True), params):
        tags, run_id = earlier.run.data.tags, earlier.run.info.run_id
        text = read_artifact(client, run_id, attempt_file("timings", int(tags.get(ATTEMPTS, 1))))
        timings = json.loads(text or "{}")
        if "seconds" in timings and "idle" not in timings["seconds"]:  # in one attempt
            return Estimate(sum(timings["seconds"].values()), timings.get("peak_memory_bytes", 0.0), earlier)
    return None
