"""Finds runs in MLflow's store."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType

from gradtrail.stages.common.params import active_params
from gradtrail.tracking.state import Identity
from gradtrail.tracking.store import experiment_id
from gradtrail.tracking.tags import flat_params, is_alive, outputs, param_text, stage_params

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
