"""Runs that a person deleted in MLflow: they stay deleted, as `gradtrail sync` rebuilds none for their results.

`.gradtrail/deleted.json` has them, so that they stay so after `mlflow gc` and in a new database. An execution of the
state makes a run all the same, and `gradtrail sync --restore RUN` brings one back.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException

from gradtrail.stages.common.files import write_json
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.paths import private_folder
from gradtrail.tracking.runs import StoredRuns, is_same_result, search
from gradtrail.tracking.store import open_store
from gradtrail.tracking.tags import REPLACED, STAGE, STATE, outputs


@dataclass(frozen=True, kw_only=True)
class DeletedRun:
    """What is kept of a run that a person deleted."""

    run_id: str
    name: str
    stage: str
    state: str
    outs: Mapping[str, str]
    params: Mapping[str, str]


def find_deleted_runs(client: MlflowClient) -> list[Run]:
    """Return the finished runs in the store that a person deleted, not this project in favor of another run."""
    runs = search(client, "attributes.status = 'FINISHED'", ViewType.DELETED_ONLY)
    return [run for run in runs if REPLACED not in run.data.tags and outputs(run.data.tags)]


def note_deleted(deleted: Iterable[Run], active: Iterable[Run]) -> list[DeletedRun]:
    """Keep runs of `find_deleted_runs` on disk; forget results that have a finished run again; return the rest."""
    before = _read()
    noted = {one.run_id: one for one in [*before, *map(_summary, deleted)]}.values()
    finished = [_summary(run) for run in active if run.info.status == "FINISHED"] if noted else []
    deleted_runs = [one for one in noted if not any(_has_result(run, one) for run in finished)]
    if deleted_runs != before:
        _write(deleted_runs)
    return deleted_runs


def _summary(run: Run) -> DeletedRun:
    tags = run.data.tags
    of_stage = {"stage": tags.get(STAGE, ""), "state": tags.get(STATE, ""), "outs": outputs(tags)}
    return DeletedRun(run_id=run.info.run_id, name=run.info.run_name, params=dict(run.data.params), **of_stage)


def _has_result(run: DeletedRun, deleted: DeletedRun) -> bool:
    """Whether a run has the result of a deleted one, of its state or of other code."""
    is_same = is_same_result(deleted.stage, (deleted.params, deleted.outs), (run.params, run.outs))
    return (run.stage == deleted.stage and is_same) or (run.state, run.outs) == (deleted.state, deleted.outs)


def restore_run(name: str) -> DeletedRun:
    """Restore a deleted run in the store, or else forget that it was deleted, so that the next sync rebuilds it.

    Args:
        name: Id of the run, a prefix of it with at least four digits, or its name.

    Raises:
        UserError: There is no such deleted run, or more than one; the message lists them.
    """
    deleted_runs, client = _read(), open_store()
    matches = [one for one in deleted_runs if one.name == name or (len(name) >= 4 and one.run_id.startswith(name))]
    if len(matches) != 1:
        labels = ", ".join(f"{one.run_id[:8]} ({one.name})" for one in matches or deleted_runs) or "none"
        why = "name or id of several deleted runs" if matches else "not the name or id of any of the deleted runs"
        raise UserError(f"--restore {one_line(name)[:100]}: {why}: {labels}")
    with contextlib.suppress(MlflowException):  # purged, of a database that was lost, or restored by now
        client.restore_run(matches[0].run_id)
    _write(one for one in deleted_runs if one != matches[0])
    return matches[0]


def require_run(restored: DeletedRun) -> None:
    """Raise UserError if a restored run could not be rebuilt."""
    runs = StoredRuns(open_store())({STATE: restored.state}, finished=True)
    if not any(outputs(run.data.tags) == restored.outs for run in runs):
        where = "the store has no such run any more, and no commit, experiment or cache has its outputs"
        raise UserError(f"--restore {restored.run_id[:8]}: {where}; `gradtrail sync` rebuilds it once they are here")


def _read() -> list[DeletedRun]:
    with contextlib.suppress(OSError, ValueError):
        return [DeletedRun(**one) for one in json.loads((private_folder() / "deleted.json").read_bytes())["runs"]]
    return []


def _write(deleted_runs: Iterable[DeletedRun]) -> None:
    write_json(private_folder() / "deleted.json", {"runs": [dataclasses.asdict(one) for one in deleted_runs]})
