"""Finds runs in MLflow's store: by a query for each search, or in the result of one query."""

from collections.abc import Iterable, Mapping

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.store.entities import PagedList
from mlflow.utils import get_results_from_paginated_fn

from gradtrail.stages.common.params import active_params
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.client import experiment_id
from gradtrail.tracking.mlflow.tags import flat_params, is_alive, outputs, param_text, stage_params

_EXPERIMENTS = ("data", "models")
_PAGE_SIZE = 1000


class StoredRuns:
    """The runs of a store; every call is a query."""

    def __init__(self, client: MlflowClient):
        self._client = client

    def __call__(self, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        """Return the runs with all these tags, newest first; only finished ones if `finished`."""
        conditions = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
        conditions += ["attributes.status = 'FINISHED'"] if finished else []
        return _search(self._client, " and ".join(conditions))

    def running(self) -> list[Run]:
        """Return the runs that are not closed."""
        return _search(self._client, "attributes.status = 'RUNNING'")


class RunIndex:
    """The runs of a store as one query returned them, with the changes that this process made since."""

    def __init__(self, client: MlflowClient):
        self._client = client
        self._runs = {run.info.run_id: run for run in _search(client, "")}

    def __call__(self, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        """Return the runs with all these tags, newest first; only finished ones if `finished`."""
        return [run for run in self.runs() if _carries(run, tags) and (not finished or run.info.status == "FINISHED")]

    def __getitem__(self, run_id: str) -> Run:
        return self._runs[run_id]

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._runs

    def runs(self) -> list[Run]:
        """Return all runs, newest first."""
        return sorted(self._runs.values(), key=lambda run: run.info.start_time, reverse=True)

    def refresh(self, run_ids: Iterable[str]) -> None:
        """Query some runs again."""
        self._runs |= {run_id: self._client.get_run(run_id) for run_id in run_ids}

    def drop(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        del self._runs[run_id]


Find = StoredRuns | RunIndex


def deleted_runs(client: MlflowClient) -> list[Run]:
    """Return the runs that were deleted, which MLflow keeps until they are purged."""
    return _search(client, "", ViewType.DELETED_ONLY)


def find_equivalent_run(find: Find, stage: Identity) -> Run | None:
    """Return the run that represents a recorded result, if there is one: of its state, or else of other code.

    A state has one result on one type of machine, and may have others on other types, each with its own run. A run of
    the same stage, params and outputs but other code also represents it.
    """
    outs = stage.out_digests()
    alike = (run for run in find({"state": stage.state}) if outputs(run.data.tags) in (outs, {}))
    best = sorted(alike, key=lambda run: (outputs(run.data.tags) != outs, run.info.status != "FINISHED"))
    return next((run for run in best if is_finished_or_live(run)), None) or _find_same_outs(find, stage, outs)


def is_finished_or_live(run: Run) -> bool:
    """Whether a run is finished, or a process of this host still works on it."""
    return run.info.status == "FINISHED" or (run.info.status == "RUNNING" and is_alive(run.data.tags))


def _find_same_outs(find: Find, stage: Identity, outs: Mapping[str, str]) -> Run | None:
    """Return a finished run of the same stage and params whose outputs are the same bytes, if there is one.

    Code that was edited or moved and wrote the same bytes gives no other result, so the state needs no second run.
    Metrics and costs are not compared: edits of code change costs and the set of metrics. Params of the stages before
    are compared if both runs have them, as other data may lead to other metrics with the same outputs.
    """
    written = (f"results/metrics/{stage.name}.json", f"results/costs/{stage.name}.json")
    compared = {out: md5 for out, md5 in outs.items() if out not in written}.items()
    read = {
        key: param_text(value) for key, value in active_params(flat_params(stage.entry(stage.name))).items()
    }.items()
    lineage = {key: param_text(value) for key, value in active_params(stage_params(stage)).items()}
    alike = (run for run in find({"stage": stage.name}, finished=True) if read <= run.data.params.items())
    same = (run for run in alike if all(run.data.params.get(key, value) == value for key, value in lineage.items()))
    return next((run for run in same if compared <= outputs(run.data.tags).items()), None)


def _search(client: MlflowClient, condition: str, view: int = ViewType.ACTIVE_ONLY) -> list[Run]:
    experiments = [experiment_id(client, name) for name in _EXPERIMENTS]

    def page(size: int, token: str | None) -> PagedList[Run]:
        order = ["attributes.start_time DESC"]
        return client.search_runs(experiments, condition, view, max_results=size, order_by=order, page_token=token)

    runs: list[Run] = get_results_from_paginated_fn(page, _PAGE_SIZE)
    return runs


def _carries(run: Run, tags: Mapping[str, str]) -> bool:
    return tags.items() <= run.data.tags.items()
