"""Checks that MLflow has the runs of an experiment's states, and rebuilds missing ones.

A stage ends without a run if the server was down. An experiment counts as done once the server has its runs.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradtrail.cluster.refs import committed_lock
from gradtrail.stages.common.pipeline_file import locked_entry
from gradtrail.support.errors import UserError, is_store_fault
from gradtrail.support.git import CommandError, run
from gradtrail.tracking.backfill import backfill_experiment
from gradtrail.tracking.runs import StoredRuns
from gradtrail.tracking.state import Experiment, state_key
from gradtrail.tracking.store import StoreClient

_PAUSE_SECONDS = 3.0


def states_of(folder: Path, commit: str, stages: Sequence[str]) -> dict[str, str]:
    """Return the states that the `dvc.lock` of a commit records, stage → key."""
    lock = committed_lock(commit, folder)
    return {stage: state_key(stage, locked_entry(lock[stage])) for stage in stages if stage in lock}


def stages_without_run(uri: str, states: dict[str, str]) -> list[str]:
    """Return the stages whose states have no finished run in MLflow's store."""
    find = StoredRuns(StoreClient(uri))
    return [stage for stage, state in states.items() if not find({"state": state}, finished=True)]


def ensure_runs(
    request_env: Mapping[str, str], folder: Path, experiment: Experiment, stages: Sequence[str], *, patience: float
) -> None:
    """Wait until MLflow has a finished run of each state of an experiment; rebuild missing ones.

    Args:
        request_env: Environment of the stages, with the address of MLflow's store.
        folder: Checkout that ran the experiment.
        experiment: The experiment.
        stages: Stages whose runs are required.
        patience: Longest time in seconds to wait for a server that is down.

    Raises:
        UserError: The server stayed down, or a run cannot be rebuilt.
    """
    states = states_of(folder, experiment.commit, stages)
    command = [sys.executable, "-m", __name__, experiment.name, experiment.baseline, experiment.commit]
    uri, deadline = request_env["MLFLOW_TRACKING_URI"], time.monotonic() + patience
    is_rebuilt = False
    while True:
        try:
            missing = stages_without_run(uri, states)
            if not missing:
                return
            if is_rebuilt:
                raise UserError(f"MLflow has no run of {', '.join(missing)}, and it cannot be rebuilt")
            run(command, folder=folder, env=request_env)
            is_rebuilt = True
        except Exception as error:
            is_away = is_store_fault(error) or isinstance(error, CommandError)
            if not is_away or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    _, name, baseline, commit = sys.argv
    backfill_experiment(Experiment(name=name, baseline=baseline, commit=commit))
