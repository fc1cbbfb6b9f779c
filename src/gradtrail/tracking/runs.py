"""Finds runs in MLflow's store."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType

from gradtrail.stages.common.dvc_cache import listing
from gradtrail.stages.common.params import active_params
from gradtrail.tracking.state import State
from gradtrail.tracking.store import experiment_id
from gradtrail.tracking.tags import flat_params, is_alive, outputs, param_text, stage_params

MAX_RESULTS = 50_000  # MLflow's limit for one query


class StoredRuns:
    """The runs of a store: a call queries those with all the given tags, newest first; finished ones if so asked."""

    def __init__(self, client: MlflowClient):
        self._client = client

    def __call__(self, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        conditions = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
        conditions += ["attributes.status = 'FINISHED'"] if finished else []
        return search(self._client, " and ".join(conditions))


class RunIndex(dict[str, Run]):
    """Id → run, of a store as one query returned it, with this process's changes; called as `StoredRuns`."""

    def __init__(self, client: MlflowClient):
        self._client = client
        # State → ids of runs, so that a sync of many states takes linear time.
        self._ids_of_state = defaultdict[str, set[str]](set)
        for run in search(client):
            self._add(run)

    def __call__(self, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        ids = self._ids_of_state[tags["state"]] & self.keys() if "state" in tags else self.keys()
        runs = [run for run in map(self.__getitem__, ids) if tags.items() <= run.data.tags.items()]
        runs = [run for run in runs if not finished or run.info.status == "FINISHED"]
        return sorted(runs, key=lambda run: run.info.start_time, reverse=True)

    def runs(self) -> list[Run]:
        """Return all runs, newest first."""
        return self({})

    def refresh(self, run_ids: Iterable[str]) -> None:
        """Query some runs again."""
        for run_id in run_ids:
            self._add(self._client.get_run(run_id))

    def _add(self, run: Run) -> None:
        self[run.info.run_id] = run
        self._ids_of_state[run.data.tags.get("state", "")].add(run.info.run_id)


Find = StoredRuns | RunIndex
Result = tuple[Mapping[str, str], Mapping[str, str]]  # params; outputs, path → digest


def search(
    client: MlflowClient, condition: str = "", view: int = ViewType.ACTIVE_ONLY, *, order: str = "start_time DESC"
) -> list[Run]:
    """Return the runs that meet a condition, by one query in MLflow's language, newest first unless `order` differs."""
    experiments = [experiment_id(client, kind) for kind in ("data", "models")]
    return list(client.search_runs(experiments, condition, view, MAX_RESULTS, [order]))


def wrote(run: Run, md5: str) -> bool:
    """Whether an output of a run is, or has, a file with this digest."""
    outs = outputs(run.data.tags).values()
    return md5 in outs or any(md5 in (listing(out) or {}).values() for out in outs if out.endswith(".dir"))


def find_equivalent_run(find: Find, stage: State) -> Run | None:
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


def result_test(stage: State) -> Callable[[Mapping[str, str], Mapping[str, str]], bool]:
    """Return a function that tells if params and outputs of a run of this stage are those of its recorded result."""
    outs, lineage = stage.out_digests(), _texts(stage_params(stage))
    read = _texts(flat_params(stage.entry(stage.name))).items()
    return lambda params, run_outs: (
        read <= params.items() and is_same_result(stage.name, (lineage, outs), (params, run_outs))
    )


def is_same_result(stage: str, result: Result, of_run: Result) -> bool:
    """Whether a run of a stage has a result, its params and outputs.

    Code that was edited or moved and wrote the same bytes gives no other result, so the state needs no second run.
    Costs are not compared, as edits of code change them. Params are compared if both have them, those of the stages
    before too, as other data may lead to the same outputs.
    """
    (params, outs), (run_params, run_outs) = result, of_run
    same_outs = all(run_outs.get(out) == md5 for out, md5 in outs.items() if out != f"results/costs/{stage}.json")
    return same_outs and all(run_params.get(key, value) == value for key, value in params.items())


def _texts(params: Mapping[str, object]) -> dict[str, str]:
    return {key: param_text(value) for key, value in active_params(params).items()}
