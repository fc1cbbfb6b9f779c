"""Whether MLflow has the runs of an experiment's states; and rebuilds those that it lacks.

A stage ends without a run where the server was away. An experiment counts as made once the server has its runs.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradtrail.cluster.task.shell import CommandError, git, run
from gradtrail.stages.common.params import parse_yaml
from gradtrail.stages.common.pipeline_file import locked_entry, parse_lock
from gradtrail.support.errors import UserError, is_store_fault
from gradtrail.tracking.lineage.keys import state_key
from gradtrail.tracking.lineage.snapshots import Experiment
from gradtrail.tracking.mlflow.client import StoreClient
from gradtrail.tracking.mlflow.search import StoredRuns
from gradtrail.tracking.sync.backfill import backfill_experiment

_PAUSE_SECONDS = 3.0


def states_of(folder: Path, commit: str, stages: Sequence[str]) -> dict[str, str]:
    """Return the states of stages that the `dvc.lock` of a commit records, stage → key."""
    lock = parse_lock(parse_yaml(git("show", f"{commit}:dvc.lock", folder=folder).encode(), "dvc.lock"), "dvc.lock")
    return {stage: state_key(stage, locked_entry(lock[stage])) for stage in stages if stage in lock}


def stages_without_run(uri: str, states: dict[str, str]) -> list[str]:
    """Return the stages whose states have no finished run in MLflow's store."""
    find = StoredRuns(StoreClient(uri))
    return [stage for stage, state in states.items() if not find({"state": state}, finished=True)]


def ensure_runs(
    request_env: Mapping[str, str], folder: Path, experiment: Experiment, stages: Sequence[str], *, patience: float
) -> None:
    """Wait until MLflow has a finished run of each state that an experiment made; rebuild those that it lacks.

    Args:
        request_env: the environment of the stages, which names MLflow's store.
        folder: the checkout that made the experiment.
        experiment: as DVC knows it.
        stages: whose runs are wanted.
        patience: seconds for a server that is away.

    Raises:
        UserError: the server stayed away, or a run cannot be rebuilt; one line.
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
                raise UserError(f"MLflow has no run of {', '.join(missing)}, and none can be rebuilt")
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
