"""`gradtrail verdict RUN`: whether an exported model satisfies the limits of `deploy/slo.yaml`, and by how much."""

import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from gradtrail.serving.candidate import Candidate, candidate_of, find_candidate
from gradtrail.serving.registry import CHAMPION, find_alias, source_of_version
from gradtrail.serving.slo import read_slo
from gradtrail.serving.verdict.judge import FAIL, PASS, Measured, judge
from gradtrail.serving.verdict.measure import WARM, measure
from gradtrail.serving.verdict.recorded import agreement, read_recorded
from gradtrail.serving.verdict.table import as_texts, format_interval, format_number
from gradtrail.stages.common.files import write_json
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import table
from gradtrail.tracking.artifacts import announce_tables
from gradtrail.tracking.store import open_store

VERDICT = "verdict"  # tag of a training's run: the text of `verdict_tag`
ARTIFACT = "verdict/verdict.json"
_TABLE = "tables/verdict.json"
_WARM_TITLE = "start to first answer with a warm compilation cache"
_RIGHT_ALIGNED = ("value", "95 % interval", "margin")


def verdict(run: str, slo: Path, *, as_json: bool, measured: Callable[[Path], dict[str, Measured]] = measure) -> int:
    """Judge the export of a run; print the verdict, and log it to the run.

    Args:
        run: The run, see `find_run`.
        slo: File with the limits.
        as_json: True if everything is printed as JSON.
        measured: Function that measures the export in a folder.

    Returns:
        The exit status: 0 for pass, 1 for fail.

    Raises:
        UserError: There is no such run or no export, or the file has a mistake; one line.
    """
    limits = read_slo(slo).limits
    client = open_store()
    candidate = find_candidate(run, client)
    candidate.export  # noqa: B018 - is downloaded before anything is measured
    numbers, missing = read_recorded(candidate)
    with_champion = _agreement(candidate, client)
    if isinstance(with_champion, Measured):
        numbers["agreement"] = with_champion
    else:
        missing["agreement"] = with_champion
    times = measured(candidate.export.folder)
    judgement = judge(limits, {**numbers, **times}, missing)
    limit_rows = {line.name: line.as_json() for line in judgement.lines}
    content = {
        "verdict": judgement.outcome,
        **_about(candidate, slo),
        "limits": limit_rows,
        "also_measured": {WARM: times[WARM].as_json()} if WARM in times else {},
    }
    rows = [as_texts(row) for row in limit_rows.values()]
    _log(candidate, content, rows, limits.digest)
    if as_json:
        stdout_console().print(json.dumps(content, indent=2, ensure_ascii=False), soft_wrap=True)
    else:
        _print(content, rows, [line.kind.title for line in judgement.failed])
    return 0 if judgement.outcome == PASS else 1


def verdict_tag(outcome: str, export: str, limits: str) -> str:
    """Return a verdict as the text of one tag, which is written in one step.

    Args:
        outcome: `pass` or `fail`.
        export: Digest of the export.
        limits: Digest of the limits.
    """
    return f"{outcome}: export {export}, limits {limits}"


def _agreement(candidate: Candidate, client: MlflowClient) -> Measured | str:
    """Return the agreement with the champion, or the reason why there is none."""
    version = find_alias(client, candidate.manifest.name, CHAMPION)
    if version is None:
        return "not judged: there is no champion"
    try:
        source = source_of_version(client, version)
        if source.digest == candidate.digest:
            return "not judged: this is the champion"
        if source.run_id is None or source.run_id not in candidate.index:
            return "the champion's run is gone"
        champion = candidate_of(candidate.index[source.run_id], client, candidate.index, source.digest)
        return agreement(candidate.predictions, champion.predictions)
    except UserError as error:
        return f"the champion cannot be read: {error}"


def _about(candidate: Candidate, slo: Path) -> dict[str, str]:
    """Return what is judged, when and where."""
    manifest = candidate.manifest
    return {
        "run": candidate.name,
        "run_id": candidate.run.info.run_id,
        "model": manifest.model,
        "name": manifest.name,
        "dataset": manifest.dataset,
        "export_digest": candidate.digest,
        "limits_file": str(slo),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _log(candidate: Candidate, content: dict[str, Any], rows: Sequence[dict[str, str]], limits: str) -> None:
    """Log the verdict to the run as JSON, as a table and as a tag; metrics of a run are few, and comparable."""
    client, run_id = candidate.client, candidate.run.info.run_id
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(ARTIFACT).name
        write_json(path, content)
        client.log_artifact(run_id, str(path), str(Path(ARTIFACT).parent))
    client.log_dict(run_id, {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}, _TABLE)
    announce_tables(client, run_id, [_TABLE])
    client.set_tag(run_id, VERDICT, verdict_tag(content["verdict"], candidate.digest, limits))


def _print(content: dict[str, Any], rows: Sequence[dict[str, str]], failed: Sequence[str]) -> None:
    console = stdout_console()
    styles = ["red" if row["verdict"].startswith(FAIL) else None for row in rows]
    console.print(f"{content['run']}  {content['model']}  export {content['export_digest'][:12]}", soft_wrap=True)
    console.print(table("", rows, right=_RIGHT_ALIGNED, no_wrap=[*rows[0]][:-1], styles=styles))
    for number in content["also_measured"].values():
        interval = format_interval(number["low"], number["high"], "s")
        console.print(f"{_WARM_TITLE}: {format_number(number['value'], 's')} {interval}, no limit", soft_wrap=True)
    reasons = f": {'; '.join(failed)}" if failed else ""
    console.print(f"\nverdict: {content['verdict']}{reasons}", style="bold", soft_wrap=True)
