"""Links the runs of stages below training to their training's run, which also shows their headline metrics."""

import time
from collections.abc import Iterator, Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Run, RunTag

from gradtrail.tracking.mlflow.models import EXPORT, attach_metrics, link_evaluation
from gradtrail.tracking.mlflow.naming import NOTE, is_headline, metric_name, note, summary_in
from gradtrail.tracking.mlflow.search import Find
from gradtrail.tracking.mlflow.tags import WEIGHTS, outputs, weights_of

PARENT = "mlflow.parentRunId"


def link_runs(client: MlflowClient, run: Run, find: Find) -> None:
    """Copy headline metrics between a run that just ended and its children or trainings that ended earlier."""
    if run.data.tags["stage"] == "train":
        for child in _children(run, find):
            if PARENT not in child.data.tags:
                client.set_tag(child.info.run_id, PARENT, run.info.run_id)
            copy_headlines(client, child, run)
    if "train_state" in run.data.tags:
        for train in trainings_of(run, find):
            copy_headlines(client, run, train)
            if EXPORT in outputs(run.data.tags):
                _copy_evaluation(client, client.get_run(train.info.run_id), find)


def copy_headlines(client: MlflowClient, child: Run, train: Run) -> bool:
    """Copy the child's headline metrics, and its summary of the gradients.

    The metrics of an evaluation also name the logged model that it evaluated, if there is one.

    Returns:
        True if anything was copied.
    """
    stage = child.data.tags["stage"]
    last = max((metric.timestamp for metric in train.data.to_proto().metrics), default=0)
    now = max(
        int(time.time() * 1000), last + 1
    )  # MLflow shows the later of two values at a step, so the clock must not go back
    precision = train.data.params.get("train.precision", "float32")
    chosen = {name: value for name, value in child.data.metrics.items() if is_headline(name, stage, precision)}
    new = {name: value for name, value in chosen.items() if train.data.metrics.get(name) != value}
    model = link_evaluation(client, child, train) if stage == "evaluate" else None
    about = {"model_id": model.model_id, "run_id": train.info.run_id} | _dataset(child) if model else {}
    metrics = [Metric(name, value, now, 0, **about) for name, value in new.items()]
    if model:
        attach_metrics(client, train, model, chosen.keys() - new.keys(), _dataset(child))
    described = child.data.tags if stage == "gradients" else train.data.tags
    data, summary = train.data, summary_in(described.get(NOTE, ""))
    words = note(train.info.run_id, data.tags, data.params, data.metrics | chosen, summary)
    tags = [RunTag(NOTE, words)] if train.data.tags.get(NOTE) != words else []
    if metrics or tags:
        client.log_batch(train.info.run_id, metrics=metrics, tags=tags)
    return bool(metrics or tags)


def _copy_evaluation(client: MlflowClient, train: Run, find: Find) -> None:
    """Link a training's model, which was just logged, to the evaluation that ended earlier."""
    for child in _children(train, find):
        if child.data.tags["stage"] == "evaluate":
            copy_headlines(client, child, train)


def _dataset(run: Run) -> dict[str, str]:
    """Return the data set of a run in the form of a model's metric."""
    datasets = [entry.dataset for entry in run.inputs.dataset_inputs] if run.inputs else []
    return {"dataset_name": datasets[0].name, "dataset_digest": datasets[0].digest} if datasets else {}


def has_headlines(train: Run, stage: str) -> bool:
    """Whether a training's run has metrics of a stage below it."""
    return any(name.startswith(metric_name(stage, "")) for name in train.data.metrics)


def _children(train: Run, find: Find) -> Iterator[Run]:
    """Yield, for each stage below training, the newest finished run that names this training or read its weights."""
    final = weights_of(train.data.tags)
    named_children = find({"train_state": train.data.tags["state"]}, finished=True)
    same_weights = find({WEIGHTS: final}, finished=True) if final else []
    newest: dict[str, Run] = {}
    for run in [*named_children, *same_weights]:
        if "train_state" in run.data.tags and weights_of(run.data.tags) in (None, final):
            newest.setdefault(run.data.tags["stage"], run)
    yield from newest.values()


def training_of(tags: Mapping[str, str], find: Find) -> Run | None:
    """Return the training that a run belongs to, by the run's tags: the state, and the weights that it read."""
    runs = find({"state": tags["train_state"]}) if "train_state" in tags else []
    read = weights_of(tags)
    complete_first = sorted(runs, key=lambda run: weights_of(run.data.tags) is None)
    return next((run for run in complete_first if read in (None, weights_of(run.data.tags) or read)), None)


def trainings_of(child: Run, find: Find) -> list[Run]:
    """Return the trainings that wrote the weights that a child read, or else the one that it names."""
    if final := weights_of(child.data.tags):
        return find({"stage": "train", WEIGHTS: final})
    return find({"stage": "train", "state": child.data.tags["train_state"]})
