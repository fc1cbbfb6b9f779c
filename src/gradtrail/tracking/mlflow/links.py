"""What ties rows together: a child hangs below its training's row, and its headline figures stand on that row too."""

import time
from collections.abc import Iterator

from mlflow import MlflowClient
from mlflow.entities import Metric, Run, RunTag

from gradtrail.tracking.mlflow.models import link_evaluation
from gradtrail.tracking.mlflow.naming import NOTE, is_headline, metric_name, note, summary_in
from gradtrail.tracking.mlflow.search import Find

PARENT = "mlflow.parentRunId"


def link_runs(client: MlflowClient, row: Run, find: Find) -> None:
    """Copy headline figures from children to the training rows whose outputs they read, whichever ends last."""
    if row.data.tags["stage"] == "train":
        for child in _children(row, find):
            if PARENT not in child.data.tags:
                client.set_tag(child.info.run_id, PARENT, row.info.run_id)
            copy_headlines(client, child, row)
    if "train_state" in row.data.tags:
        for train in _trainings(row, find):
            copy_headlines(client, row, train)


def copy_headlines(client: MlflowClient, child: Run, train: Run) -> bool:
    """Copy the child's figures, those of single classes and functions aside, and what it says in words.

    Returns:
        Whether there was something to copy.
    """
    now, stage = int(time.time() * 1000), child.data.tags["stage"]
    chosen = {name: value for name, value in child.data.metrics.items() if is_headline(name, stage)}
    new = {name: value for name, value in chosen.items() if train.data.metrics.get(name) != value}
    model = link_evaluation(client, child, train) if new and stage == "evaluate" else None
    about = {"model_id": model.model_id, "run_id": train.info.run_id} | _dataset(child) if model else {}
    metrics = [Metric(name, value, now, 0, **about) for name, value in new.items()]
    told = child.data.tags if stage == "gradients" else train.data.tags
    words = note(train.info.run_id, train.data.tags, train.data.metrics | chosen, summary_in(told.get(NOTE, "")))
    tags = [RunTag(NOTE, words)] if train.data.tags.get(NOTE) != words else []
    if metrics or tags:
        client.log_batch(train.info.run_id, metrics=metrics, tags=tags)
    return bool(metrics or tags)


def _dataset(row: Run) -> dict[str, str]:
    """Return the data set of a row, as a metric of a model names it."""
    datasets = [found.dataset for found in row.inputs.dataset_inputs] if row.inputs else []
    return {"dataset_name": datasets[0].name, "dataset_digest": datasets[0].digest} if datasets else {}


def has_headlines(train: Run, stage: str) -> bool:
    """Whether a training's row shows figures of a stage below it."""
    return any(name.startswith(metric_name(stage, "")) for name in train.data.metrics)


def _children(train: Run, find: Find) -> Iterator[Run]:
    """Yield, for each stage below training, the newest finished row that belongs to this training or its bytes."""
    final = train.data.tags.get("output/models/final.safetensors")
    own = find({"train_state": train.data.tags["state"]}, finished=True)
    alike = find({"input/models/final.safetensors": final}, finished=True) if final else []
    newest: dict[str, Run] = {}
    for row in [*own, *alike]:
        newest.setdefault(row.data.tags["stage"], row)
    yield from newest.values()


def _trainings(child: Run, find: Find) -> list[Run]:
    """Return the rows of the trainings that wrote what the child read, or that it names."""
    final = child.data.tags.get("input/models/final.safetensors")
    if final:
        return find({"stage": "train", "output/models/final.safetensors": final})
    return find({"stage": "train", "state": child.data.tags["train_state"]})
