"""Finding rows in MLflow's store: by asking it, or in what it answered once."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType

from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.client import experiment_id
from gradtrail.tracking.mlflow.tags import flat_params, input_tags, is_alive, shown, stage_params

_EXPERIMENTS = ("data", "models")
_PAGE = 1000


class Find(Protocol):
    """Returns all rows that carry all these tags, the newest first; only finished ones if asked."""

    def __call__(self, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]: ...


class StoredRuns:
    """The rows of a store, as it has them; each question is asked of the store.

    Args:
        client: of the store.
    """

    def __init__(self, client: MlflowClient):
        self._client = client

    def __call__(self, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        """Return all rows that carry all these tags, the newest first; only finished ones if asked."""
        conditions = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
        conditions += ["attributes.status = 'FINISHED'"] if finished else []
        return list(_search(self._client, " and ".join(conditions)))

    def running(self) -> list[Run]:
        """Return the rows that are not closed."""
        return list(_search(self._client, "attributes.status = 'RUNNING'"))


class RunIndex:
    """The rows of a store, as one search had them, and as they became since through this process.

    Args:
        client: of the store.
    """

    def __init__(self, client: MlflowClient):
        self._client = client
        self._rows = {row.info.run_id: row for row in _search(client, "")}

    def __call__(self, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        """Return all rows that carry all these tags, the newest first; only finished ones if asked."""
        return [row for row in self.rows() if _carries(row, tags) and (not finished or row.info.status == "FINISHED")]

    def __getitem__(self, run_id: str) -> Run:
        return self._rows[run_id]

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._rows

    def rows(self) -> list[Run]:
        """Return all, the newest first."""
        return sorted(self._rows.values(), key=lambda row: row.info.start_time, reverse=True)

    def refresh(self, run_ids: Iterable[str]) -> None:
        """Ask the store for some rows anew."""
        self._rows |= {run_id: self._client.get_run(run_id) for run_id in run_ids}

    def drop(self, run_id: str) -> None:
        """Forget a row that was deleted."""
        del self._rows[run_id]


def deleted_runs(client: MlflowClient) -> list[Run]:
    """Return the rows that were deleted, which MLflow keeps until they are purged."""
    return list(_search(client, "", ViewType.DELETED_ONLY))


def find_run(client: MlflowClient, **tags: str) -> Run | None:
    """Return the newest row that carries all these tags."""
    rows = StoredRuns(client)(tags)
    return rows[0] if rows else None


def find_twin(find: Find, stage: Identity) -> Run | None:
    """Return a finished row of the same stage, code, inputs and params read, under another training, if there is one.

    Two trainings may write the same bytes; then DVC evaluates once, and one row serves both.
    """
    if not stage.is_below_training:
        return None
    entry = stage.entry(stage.name)
    tags = {"stage": stage.name, "code": entry.code_digest, **input_tags(entry)}
    read = {key: shown(value) for key, value in flat_params(entry).items()}
    return next((row for row in find(tags, finished=True) if read.items() <= row.data.params.items()), None)


def find_alike(find: Find, stage: Identity) -> Run | None:
    """Return a finished row of the same stage and params whose outs are the same bytes, if there is one: code aside.

    Code that was edited and wrote the same bytes is no other result, so its state is not worth a row made anew. The
    metrics file does not count: it also has what the stage's functions cost, which edits of code change.
    """
    outs = {out: found for out, found in stage.out_digests().items() if out != f"metrics/{stage.name}.json"}
    tags = {"stage": stage.name} | {f"output/{out}": found for out, found in outs.items()}
    params = {key: shown(value) for key, value in stage_params(stage).items()}
    return next((row for row in find(tags, finished=True) if row.data.params == params), None)


def find_equivalent_run(find: Find, stage: Identity) -> Run | None:
    """Return the row that stands for the state of a snapshot's stage, if there is one: its own, or another's.

    Another's: a twin, or, of a commit's state, one that differs in code alone.
    """
    row = next((row for row in find({"state": stage.state}) if is_whole(row)), None) or find_twin(find, stage)
    is_committed = stage.snapshot is not None and stage.snapshot.commit != ""
    return row or (find_alike(find, stage) if is_committed else None)


def is_whole(row: Run) -> bool:
    """Whether a row is finished, or a process of this host is still at work on it."""
    return row.info.status == "FINISHED" or (row.info.status == "RUNNING" and is_alive(row.data.tags))


def _search(client: MlflowClient, condition: str, view: int = ViewType.ACTIVE_ONLY) -> Iterator[Run]:
    experiments = [experiment_id(client, name) for name in _EXPERIMENTS]
    token: str | None = None
    while True:
        order = ["attributes.start_time DESC"]
        page = client.search_runs(experiments, condition, view, max_results=_PAGE, order_by=order, page_token=token)
        yield from page
        if not (token := page.token):
            return


def _carries(row: Run, tags: Mapping[str, str]) -> bool:
    return tags.items() <= row.data.tags.items()
