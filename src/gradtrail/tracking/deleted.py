"""Results whose run a person deleted in MLflow: `gradtrail sync` rebuilds none of them.

`.gradtrail/deleted.json` has them, so that they stay deleted after `mlflow gc` and in a new database. A result is
forgotten once it has a finished run again, as its state was executed or the run was restored in MLflow.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType

from gradtrail.stages.common.files import write_json
from gradtrail.support.paths import private_folder
from gradtrail.tracking.runs import is_same_result, search
from gradtrail.tracking.tags import REPLACED, STAGE, STATE, outputs


@dataclass(frozen=True, kw_only=True)
class DeletedResult:
    """What is kept of a run that a person deleted."""

    stage: str
    state: str
    outs: Mapping[str, str]
    params: Mapping[str, str]


def find_deleted_runs(client: MlflowClient) -> list[Run]:
    """Return the finished runs in the store that a person deleted, not this project in favor of another run."""
    runs = search(client, "attributes.status = 'FINISHED'", ViewType.DELETED_ONLY)
    return [run for run in runs if REPLACED not in run.data.tags and outputs(run.data.tags)]


def deleted_results(deleted: Iterable[Run], active: Iterable[Run]) -> list[DeletedResult]:
    """Return the results of runs of `find_deleted_runs`, now and before, which have no finished run."""
    path, known = private_folder() / "deleted.json", list[DeletedResult]()
    with contextlib.suppress(OSError, ValueError, LookupError):
        known = [DeletedResult(**one) for one in json.loads(path.read_bytes())["results"]]
    results = [*known, *(new for new in map(_result, deleted) if new not in known)]
    finished = [_result(run) for run in active if run.info.status == "FINISHED"] if results else []
    results = [one for one in results if not any(_is_result(run, one) for run in finished)]
    if results != known:
        write_json(path, {"results": [dataclasses.asdict(one) for one in results]})
    return results


def _result(run: Run) -> DeletedResult:
    tags = run.data.tags
    of_stage = {"stage": tags.get(STAGE, ""), "state": tags.get(STATE, "")}
    return DeletedResult(outs=outputs(tags), params=dict(run.data.params), **of_stage)


def _is_result(run: DeletedResult, deleted: DeletedResult) -> bool:
    """Whether a run has the result of a deleted one, of its state or of other code."""
    is_same = is_same_result(deleted.stage, (deleted.params, deleted.outs), (run.params, run.outs))
    return (run.stage == deleted.stage and is_same) or (run.state, run.outs) == (deleted.state, deleted.outs)
