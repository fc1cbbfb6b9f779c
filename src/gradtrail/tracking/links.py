"""Links the runs of stages below training to that of their training, and describes runs.

A training's run is the parent of theirs, and also shows their headline metrics. Trainings that differ only in the seed
have a parent too: see `variants`.
"""

import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Run, RunTag

from gradtrail.tracking.models import log_evaluation, log_export
from gradtrail.tracking.names import is_headline, note, summary_in
from gradtrail.tracking.record import MODEL, Record
from gradtrail.tracking.render import EXPORT, SUMMARY
from gradtrail.tracking.runs import Find, StoredRuns, wrote
from gradtrail.tracking.tags import BYTES, NOTE, PARENT, START, START_RUN, VARIANT, WEIGHTS, outputs
from gradtrail.tracking.variants import update_parent


def parent_tag(client: MlflowClient, tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tag that makes a run a child of its training's run, if there is one."""
    parent = training_of(tags, StoredRuns(client))
    return {PARENT: parent.info.run_id} if parent else {}


def link(client: MlflowClient, run_id: str, record: Record) -> None:
    """Log the model of a record, describe its run, and link that of an execution to its parent and children."""
    run, runs = client.get_run(run_id), StoredRuns(client)
    if (model := record.folder / MODEL).exists():
        for train in trainings_of(run, runs):
            log_export(client, train, model)
    data, summary = run.data, record.artifacts / SUMMARY
    words = summary.read_text(encoding="utf-8") if summary.is_file() else summary_in(data.tags.get(NOTE, ""))
    client.set_tag(run_id, NOTE, note(run_id, data.tags, data.params, data.metrics, words))
    _link_start(client, run, runs)
    if BYTES not in data.tags:  # the backfill chooses which of several children a training shows, and makes parents
        return
    run = client.get_run(run_id)
    for train in trainings_of(run, runs):
        children = [run]
        if train.info.run_id == run_id:
            children = _children(train, runs)
        elif EXPORT in outputs(data.tags):  # the training has a new model, whose evaluation ended earlier
            children += [one for one in _children(train, runs) if one.data.tags["stage"] == "evaluate"]
        for child in children:
            if child is not run and PARENT not in child.data.tags:
                client.set_tag(child.info.run_id, PARENT, train.info.run_id)
            copy_headlines(client, child, client.get_run(train.info.run_id))
        if VARIANT in train.data.tags:
            update_parent(client, train.data.tags[VARIANT])


def _link_start(client: MlflowClient, run: Run, find: Find) -> None:
    """Tag a training from weights with the newest run that wrote them, if there is one."""
    if (md5 := run.data.tags.get(START)) and (origin := next((one for one in find({}) if wrote(one, md5)), None)):
        client.set_tag(run.info.run_id, START_RUN, origin.info.run_id)


def copy_headlines(client: MlflowClient, child: Run, train: Run) -> bool:
    """Copy the child's headline metrics, and its summary of the gradients; those of an evaluation to the model too.

    Returns:
        True if anything was copied to the training.
    """
    run_id, stage, data = train.info.run_id, child.data.tags["stage"], train.data
    chosen = {name: value for name, value in child.data.metrics.items() if is_headline(name, stage)}
    # MLflow shows the later of two values at a step, so the clock must not go back.
    latest = max((metric.timestamp for metric in data.to_proto().metrics), default=0)
    now = max(int(time.time() * 1000), latest + 1)
    metrics = [Metric(name, value, now, 0) for name, value in chosen.items() if data.metrics.get(name) != value]

    described = child.data.tags if stage == "gradients" else data.tags
    words = note(run_id, data.tags, data.params, data.metrics | chosen, summary_in(described.get(NOTE, "")))
    tags = [RunTag(NOTE, words)] if data.tags.get(NOTE) != words else []
    if metrics or tags:
        client.log_batch(run_id, metrics=metrics, tags=tags)

    if stage == "evaluate":
        log_evaluation(client, child, train, chosen)
    return bool(metrics or tags)


def training_of(tags: Mapping[str, str], find: Find) -> Run | None:
    """Return the training that a run belongs to, by the run's tags: the state, and the weights that it read."""
    runs = find({"state": tags["train_state"]}) if "train_state" in tags else []
    read = tags.get(WEIGHTS)
    complete_first = sorted(runs, key=lambda run: run.data.tags.get(WEIGHTS) is None)
    return next((run for run in complete_first if read in (None, run.data.tags.get(WEIGHTS) or read)), None)


def trainings_of(run: Run, find: Find) -> list[Run]:
    """Return the trainings that wrote the weights that a run read, or else the one that it names; a training itself."""
    tags = run.data.tags
    if "train_state" not in tags:
        return [run] if tags["stage"] == "train" else []
    key = WEIGHTS if tags.get(WEIGHTS) else "state"
    return find({"stage": "train", key: tags.get(WEIGHTS) or tags["train_state"]})


def _children(train: Run, find: Find) -> list[Run]:
    """Return, for each stage below training, the newest finished run that names this training or read its weights."""
    final = train.data.tags.get(WEIGHTS)
    named_children = find({"train_state": train.data.tags["state"]}, finished=True)
    same_weights = find({WEIGHTS: final}, finished=True) if final else []
    newest: dict[str, Run] = {}
    for run in [*named_children, *same_weights]:
        if "train_state" in run.data.tags and run.data.tags.get(WEIGHTS) in (None, final):
            newest.setdefault(run.data.tags["stage"], run)
    return list(newest.values())
