"""Finds runs in MLflow's store, and links the runs of stages below training to that of their training.

A training's run is the parent of theirs, and also shows their headline metrics.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Run, RunTag, ViewType

from gradtrail.stages.common.params import active_params
from gradtrail.tracking.journal import EXPORT
from gradtrail.tracking.models import attach_points, link_evaluation
from gradtrail.tracking.names import NOTE, is_headline, note, summary_in
from gradtrail.tracking.state import Identity
from gradtrail.tracking.store import experiment_id
from gradtrail.tracking.tags import WEIGHTS, flat_params, is_alive, outputs, param_text, stage_params

PARENT = "mlflow.parentRunId"
MAX_RESULTS = 50_000  # MLflow's limit for one query


class StoredRuns:
    """The runs of a store; every call is a query.

    A call returns the runs with all the given tags, newest first; only finished ones if `finished`.
    """

    def __init__(self, client: MlflowClient):
        self._client = client

    def __call__(self, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        conditions = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
        conditions += ["attributes.status = 'FINISHED'"] if finished else []
        return search(self._client, " and ".join(conditions))

    def running(self) -> list[Run]:
        """Return the runs that are not closed."""
        return search(self._client, "attributes.status = 'RUNNING'")


class RunIndex:
    """The runs of a store as one query returned them, with the changes that this process made since.

    It is called as `StoredRuns`.
    """

    def __init__(self, client: MlflowClient):
        self._client = client
        self._runs: dict[str, Run] = {}
        # State → ids of runs, so that a sync of many states takes linear time.
        self._ids_of_state = defaultdict[str, set[str]](set)
        for run in search(client):
            self._add(run)

    def __call__(self, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        ids = self._ids_of_state[tags["state"]] & self._runs.keys() if "state" in tags else self._runs.keys()
        runs = [run for run in map(self._runs.__getitem__, ids) if tags.items() <= run.data.tags.items()]
        return _newest_first(run for run in runs if not finished or run.info.status == "FINISHED")

    def __getitem__(self, run_id: str) -> Run:
        return self._runs[run_id]

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._runs

    def runs(self) -> list[Run]:
        """Return all runs, newest first."""
        return _newest_first(self._runs.values())

    def refresh(self, run_ids: Iterable[str]) -> None:
        """Query some runs again."""
        for run_id in run_ids:
            self._add(self._client.get_run(run_id))

    def drop(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        del self._runs[run_id]

    def _add(self, run: Run) -> None:
        self._runs[run.info.run_id] = run
        self._ids_of_state[run.data.tags.get("state", "")].add(run.info.run_id)


Find = StoredRuns | RunIndex


def search(client: MlflowClient, condition: str = "", view: int = ViewType.ACTIVE_ONLY) -> list[Run]:
    """Return the runs that meet a condition in MLflow's language, newest first, by one query."""
    experiments = [experiment_id(client, kind) for kind in ("data", "models")]
    order = ["attributes.start_time DESC"]
    return list(client.search_runs(experiments, condition, view, max_results=MAX_RESULTS, order_by=order))


def find_equivalent_run(find: Find, stage: Identity) -> Run | None:
    """Return the run that represents a recorded result, if there is one: of its state, or else of other code.

    A state may have another result, and another run, on another type of machine. A run without outputs represents a
    state only while a process of this host works on it.
    """
    outs = stage.out_digests()
    alike = [run for run in find({"state": stage.state}) if outputs(run.data.tags) in (outs, {})]
    best = sorted(alike, key=lambda run: (outputs(run.data.tags) != outs, run.info.status != "FINISHED"))
    if run_of_state := next((run for run in best if is_finished_or_live(run)), None):
        return run_of_state
    is_same_result, runs = result_test(stage), find({"stage": stage.name}, finished=True)
    return next((run for run in runs if is_same_result(run.data.params, outputs(run.data.tags))), None)


def is_finished_or_live(run: Run) -> bool:
    """Whether a run is finished, with outputs, or a process of this host still works on it."""
    is_finished = run.info.status == "FINISHED" and outputs(run.data.tags) != {}
    return is_finished or (run.info.status == "RUNNING" and is_alive(run.data.tags))


def result_test(stage: Identity) -> Callable[[Mapping[str, str], Mapping[str, str]], bool]:
    """Return a function that says whether params and outputs of a run of this stage are those of its recorded result.

    Code that was edited or moved and wrote the same bytes gives no other result, so the state needs no second run.
    Costs are not compared, as edits of code change them. Params of the stages before are compared if both runs have
    them, as other data may lead to the same outputs.
    """
    costs = f"results/costs/{stage.name}.json"
    compared = {out: md5 for out, md5 in stage.out_digests().items() if out != costs}.items()
    read = _texts(flat_params(stage.entry(stage.name))).items()
    lineage = _texts(stage_params(stage))

    def is_same_result(params: Mapping[str, str], outs: Mapping[str, str]) -> bool:
        same_params = read <= params.items() and all(params.get(key, lineage[key]) == lineage[key] for key in lineage)
        return same_params and compared <= outs.items()

    return is_same_result


def _texts(params: Mapping[str, object]) -> dict[str, str]:
    return {key: param_text(value) for key, value in active_params(params).items()}


def _newest_first(runs: Iterable[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: run.info.start_time, reverse=True)


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


def training_of(tags: Mapping[str, str], find: Find) -> Run | None:
    """Return the training that a run belongs to, by the run's tags: the state, and the weights that it read."""
    runs = find({"state": tags["train_state"]}) if "train_state" in tags else []
    read = tags.get(WEIGHTS)
    complete_first = sorted(runs, key=lambda run: run.data.tags.get(WEIGHTS) is None)
    return next((run for run in complete_first if read in (None, run.data.tags.get(WEIGHTS) or read)), None)


def trainings_of(child: Run, find: Find) -> list[Run]:
    """Return the trainings that wrote the weights that a child read, or else the one that it names."""
    if final := child.data.tags.get(WEIGHTS):
        return find({"stage": "train", WEIGHTS: final})
    return find({"stage": "train", "state": child.data.tags["train_state"]})


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
