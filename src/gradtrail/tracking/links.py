"""Links the runs of stages below training to their training's run, which also shows their headline metrics."""

import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Run, RunTag

from gradtrail.tracking.models import EXPORT, attach_points, link_evaluation
from gradtrail.tracking.names import NOTE, is_headline, metric_name, note, summary_in
from gradtrail.tracking.search import Find
from gradtrail.tracking.tags import WEIGHTS, outputs, weights_of

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
            if EXPORT in outputs(run.data.tags):  # the training has a new model, whose evaluation ended earlier
                for child in _children(train, find):
                    if child.data.tags["stage"] == "evaluate":
                        copy_headlines(client, child, client.get_run(train.info.run_id))


def copy_headlines(client: MlflowClient, child: Run, train: Run) -> bool:
    """Copy the child's headline metrics, and its summary of the gradients; those of an evaluation to the model too.

    Returns:
        True if anything was copied to the training.
    """
    run_id, stage, data = train.info.run_id, child.data.tags["stage"], train.data
    precision = data.params.get("train.precision", "float32")
    chosen = {name: value for name, value in child.data.metrics.items() if is_headline(name, stage, precision)}
    # MLflow shows the later of two values at a step, so the clock must not go back.
    latest = max((metric.timestamp for metric in data.to_proto().metrics), default=0)
    now = max(int(time.time() * 1000), latest + 1)
    metrics = [Metric(name, value, now, 0) for name, value in chosen.items() if data.metrics.get(name) != value]

    described = child.data.tags if stage == "gradients" else data.tags
    words = note(run_id, data.tags, data.params, data.metrics | chosen, summary_in(described.get(NOTE, "")))
    tags = [RunTag(NOTE, words)] if data.tags.get(NOTE) != words else []
    if metrics or tags:
        client.log_batch(run_id, metrics=metrics, tags=tags)

    if stage == "evaluate" and (model := link_evaluation(client, child, train)):
        by_time = sorted(model.metrics or (), key=lambda point: point.timestamp)
        logged = {point.key: point.value for point in by_time}
        missing = [name for name, value in chosen.items() if logged.get(name) != value]
        histories = [client.get_metric_history(run_id, name) for name in missing]
        last = [max(history, key=lambda point: point.timestamp) for history in histories]
        attach_points(client, model, last, measured_by=child)
    return bool(metrics or tags)


def has_headlines(train: Run, stage: str) -> bool:
    """Whether a training's run has metrics of a stage below it."""
    return any(name.startswith(metric_name(stage, "")) for name in train.data.metrics)


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


def _children(train: Run, find: Find) -> list[Run]:
    """Return, for each stage below training, the newest finished run that names this training or read its weights."""
    final = weights_of(train.data.tags)
    named_children = find({"train_state": train.data.tags["state"]}, finished=True)
    same_weights = find({WEIGHTS: final}, finished=True) if final else []
    newest: dict[str, Run] = {}
    for run in [*named_children, *same_weights]:
        if "train_state" in run.data.tags and weights_of(run.data.tags) in (None, final):
            newest.setdefault(run.data.tags["stage"], run)
    return list(newest.values())
