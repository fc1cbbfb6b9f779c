"""Runs the planned runs that are not complete, with an engine."""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gradtrail.experiments.sections import section_configs
from gradtrail.experiments.sweep.engine import Engine
from gradtrail.experiments.sweep.members import read_table, varies_all
from gradtrail.experiments.sweep.runs import CompletedRun, RunFinder
from gradtrail.experiments.sweep.spec import STAGE, Comparison, PlannedRun, Training, params_of, trainings_of
from gradtrail.stages.common.params import PARAMS, read_yaml, validate
from gradtrail.support.errors import with_store
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.search import RunIndex
from gradtrail.tracking.sync import sync


def run_finder() -> RunFinder:
    """Return a finder of completed runs in the store."""
    client = open_store()
    return RunFinder(RunIndex(client), functools.partial(read_table, client))


def complete(
    name: str, comparison: Comparison, planned: Sequence[PlannedRun], engine: Engine, source: str
) -> list[CompletedRun]:
    """Run the missing ones of the planned runs; return the complete ones, and print why the rest is not.

    Args:
        name: Name of the comparison in messages.
        comparison: Comparison that the runs belong to.
        planned: All runs.
        engine: Engine that runs the missing ones.
        source: Prefix of a variant's name in errors.

    Raises:
        UserError: A param is invalid, the engine fails, or the store cannot be reached.
    """
    completed = with_store(lambda: _find(planned, comparison))
    missing = _without(planned, completed)
    if not missing:
        return completed
    together = not comparison.timed and varies_all(read_yaml(PARAMS))
    all_trainings = {str(training): training for training in trainings_of(planned, together=together)}
    trainings = {str(training): training for training in trainings_of(missing, together=together)}
    _require_valid(list(trainings.values()), comparison, source)
    failed = engine.run(name, _changes(all_trainings, comparison), _changes(trainings, comparison), STAGE)
    why = {run: reason for label, reason in failed.items() for run in trainings[label].runs}
    completed = with_store(lambda: _find(planned, comparison))
    for run in _without(planned, completed):
        print(f"{run}: {f'failed; {why[run]}' if run in why else 'has no run in MLflow'}", file=sys.stderr)
    return completed


def _changes(trainings: Mapping[str, Training], comparison: Comparison) -> dict[str, dict[str, Any]]:
    return {label: training.changes(comparison) for label, training in trainings.items()}


def _find(planned: Sequence[PlannedRun], comparison: Comparison) -> list[CompletedRun]:
    """Return the completed runs, after a sync: DVC may have restored some without a run in MLflow."""
    sync()
    return run_finder().find(planned, comparison)


def _without(planned: Sequence[PlannedRun], completed: Sequence[CompletedRun]) -> list[PlannedRun]:
    done = {run.planned for run in completed}
    return [run for run in planned if run not in done]


def _require_valid(trainings: Sequence[Training], comparison: Comparison, source: str) -> None:
    """Refuse params that a stage would refuse, before any experiment starts."""
    params, configs = read_yaml(PARAMS), section_configs()
    for training in trainings:
        changed_params = params_of(training, comparison, params)
        for section, into in configs.items():
            validate(changed_params.get(section), into, f"{source}.{training.label}: {section}")
