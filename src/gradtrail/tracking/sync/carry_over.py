"""Carries over the runs of the version before, whose key of a state also covered the states of the stages upstream.

Those runs have today's key as their tag `entry`. This goes when no store has such runs any more.
"""

from mlflow import MlflowClient
from mlflow.entities import RunTag

from gradtrail.tracking.mlflow.search import RunIndex

_TODAYS = "entry"


def carry_over_keys(client: MlflowClient, index: RunIndex) -> None:
    """Give runs of the version before today's key, and that of the training that they belong to."""
    old = [run for run in index.runs() if {_TODAYS, "state"} <= run.data.tags.keys()]
    old.sort(key=lambda run: "train_state" not in run.data.tags)  # trainings last: their old keys are looked up
    todays = {run.data.tags["state"]: run.data.tags[_TODAYS] for run in old}
    for run in old:
        tags = {"state": run.data.tags[_TODAYS]}
        if training := run.data.tags.get("train_state"):
            tags["train_state"] = todays.get(training, training)
        client.log_batch(run.info.run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        client.delete_tag(run.info.run_id, _TODAYS)  # last: an interrupted one is begun again
        index.refresh([run.info.run_id])
