"""Finds which of the planned runs are complete, and has an engine run those that are missing."""

import functools
import sys
from collections.abc import Sequence

from gradtrail.experiments.sections import section_configs
from gradtrail.experiments.sweep.engine import Engine
from gradtrail.experiments.sweep.members import read_table, varies_all
from gradtrail.experiments.sweep.runs import CompletedRun, RunFinder
from gradtrail.experiments.sweep.spec import STAGE, Comparison, PlannedRun, Training, params_of, trainings_of
from gradtrail.stages.common.overrides import PARAMS
from gradtrail.stages.common.params import read_yaml, validate
from gradtrail.support.errors import with_store
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.search import RunIndex
from gradtrail.tracking.sync.sync import sync


def run_finder() -> RunFinder:
    """Return a finder of completed runs in the store."""
    client = open_store()
    return RunFinder(RunIndex(client), functools.partial(read_table, client))


def complete(
    name: str, comparison: Comparison, planned: Sequence[PlannedRun], engine: Engine, source: str
) -> list[CompletedRun]:
    """Run what is missing of the planned runs; return those that are complete, and say of the others why.

    Args:
        name: of the comparison, in messages.
        comparison: whose runs they are.
        planned: the runs.
        engine: that runs what is missing.
        source: prefix of a variant's name in errors.

    Raises:
        UserError: a param is invalid, the engine fails, or the store is out of reach; one line.
    """
    completed = with_store(lambda: _find(planned, comparison))
    missing = _without(planned, completed)
    if not missing:
        return completed
    together = not comparison.timed and varies_all(read_yaml(PARAMS))
    everything = {str(one): one.changes(comparison) for one in trainings_of(planned, together=together)}
    trainings = {str(one): one for one in trainings_of(missing, together=together)}
    _require_valid(list(trainings.values()), comparison, source)
    wanted = {label: one.changes(comparison) for label, one in trainings.items()}
    failed = engine.run(name, everything, wanted, STAGE)
    why = {run: reason for label, reason in failed.items() for run in trainings[label].runs}
    completed = with_store(lambda: _find(planned, comparison))
    for run in _without(planned, completed):
        print(f"{run}: {f'failed; {why[run]}' if run in why else 'has no run in MLflow'}", file=sys.stderr)
    return completed


def _find(planned: Sequence[PlannedRun], comparison: Comparison) -> list[CompletedRun]:
    """Return the completed runs, after a sync: DVC may have restored some without a run in MLflow."""
    sync()
    return run_finder().find(planned, comparison)


def _without(planned: Sequence[PlannedRun], completed: Sequence[CompletedRun]) -> list[PlannedRun]:
    found = {each.planned for each in completed}
    return [run for run in planned if run not in found]


def _require_valid(trainings: Sequence[Training], comparison: Comparison, source: str) -> None:
    """Refuse params that a stage would refuse, before any experiment is started."""
    params, configs = read_yaml(PARAMS), section_configs()
    for training in trainings:
        changed_params = params_of(training, comparison, params)
        for section, into in configs.items():
            validate(changed_params.get(section), into, f"{source}.{training.label}: {section}")
