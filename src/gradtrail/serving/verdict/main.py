"""`gradtrail verdict RUN`: whether an exported model keeps the limits of `deploy/slo.yaml`, and by how much."""

import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from rich.table import Table

from gradtrail.serving.candidate import Candidate, candidate_of, find_candidate
from gradtrail.serving.registry import CHAMPION, of_alias, source_of_version
from gradtrail.serving.slo import read_slo
from gradtrail.serving.verdict import page
from gradtrail.serving.verdict.judge import PASS, Judgement, Line, Measured, judge
from gradtrail.serving.verdict.known import agreement, known
from gradtrail.serving.verdict.measure import WARM, measure
from gradtrail.stages.common.files import atomic_file, write_json
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.tracking.mlflow.artifacts import announce_tables
from gradtrail.tracking.mlflow.client import open_store

VERDICT = "verdict"  # tag of a training's run: the text of `verdict_tag`
PAGE = Path("results/verdict.html")
_ARTIFACTS = "verdict"
_TABLE = "tables/verdict.json"
_JSON = "verdict.json"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found of a model.

    Attributes:
        judgement: its limits.
        beside: numbers that no limit is of.
        about: what was judged, when and where; texts.
    """

    judgement: Judgement
    beside: Mapping[str, Measured]
    about: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain data; infinite ends are null."""
        limits = {line.name: _line_as_json(line) for line in self.judgement.lines}
        beside = {name: _measured_as_json(found) for name, found in self.beside.items()}
        return {"verdict": self.judgement.outcome, **self.about, "limits": limits, "beside": beside}


def verdict(what: str, slo: Path, *, as_json: bool, measured: Callable[[Path], dict[str, Measured]] = measure) -> int:
    """Judge the export of a run; tell it on the terminal, as a page, and on the run.

    Args:
        what: the run, see `find_run`.
        slo: file with the limits.
        as_json: print everything as JSON.
        measured: measures an exported model.

    Returns:
        The exit status: 0 for pass, 1 for fail.

    Raises:
        UserError: no such run, no export, or a mistake in the file; one line.
    """
    limits = read_slo(slo).limits
    client = open_store()
    candidate = find_candidate(what, client)
    candidate.export  # noqa: B018 - is downloaded, before anything is measured
    found, missing = known(candidate)
    champion = _agreement(candidate, client)
    if isinstance(champion, Measured):
        found |= {"agreement": champion}
    else:
        missing |= {"agreement": champion}
    times = measured(candidate.export.folder)
    judgement = judge(limits, {**found, **times}, missing)
    shown = {name: times[name] for name in (WARM,) if name in times}
    said = Verdict(judgement=judgement, beside=shown, about=_about(candidate, slo))
    with atomic_file(PAGE) as temporary:
        temporary.write_text(page.render(said.judgement, said.beside, said.about), encoding="utf-8")
    _log(candidate, said, limits.digest)
    _print(said, as_json=as_json)
    return 0 if judgement.outcome == PASS else 1


def verdict_tag(outcome: str, export: str, limits: str) -> str:
    """Return a verdict as the text of one tag, which no other verdict can overwrite in part.

    Args:
        outcome: `pass` or `fail`.
        export: digest of the export.
        limits: digest of the limits.
    """
    return f"{outcome}: export {export}, limits {limits}"


def as_rows(judgement: Judgement) -> list[dict[str, str]]:
    """Return the limits as texts, by the titles of the columns."""
    return [
        {
            "limit": line.kind.title,
            "value": number(line.measured.value, line.kind.unit) if line.measured else "–",
            "95 % interval": interval(line.measured, line.kind.unit),
            "must be": f"{line.kind.side} {number(line.limit, line.kind.unit)}" if line.limit is not None else "–",
            "margin": page.margin(line),
            "verdict": line.outcome,
        }
        for line in judgement.lines
    ]


number, interval = page.number, page.interval


def _agreement(candidate: Candidate, client: MlflowClient) -> Measured | str:
    """Return the agreement with the champion, or why there is none."""
    name = candidate.manifest.name
    version = of_alias(client, name, CHAMPION)
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


def _log(candidate: Candidate, said: Verdict, limits: str) -> None:
    """Log the verdict to the run: as files, and as a tag; as no metrics, of which a run has few and comparable ones."""
    client, run_id = candidate.client, candidate.run.info.run_id
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / _JSON, said.as_json())
        client.log_artifact(run_id, str(Path(folder) / _JSON), _ARTIFACTS)
    client.log_artifact(run_id, str(PAGE), _ARTIFACTS)
    rows = as_rows(said.judgement)
    table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
    client.log_dict(run_id, table, _TABLE)
    announce_tables(client, run_id, [_TABLE])
    client.set_tag(run_id, VERDICT, verdict_tag(said.judgement.outcome, candidate.digest, limits))


def _print(said: Verdict, *, as_json: bool) -> None:
    console = stdout_console()
    if as_json:
        console.print(json.dumps(said.as_json(), indent=2, ensure_ascii=False), soft_wrap=True)
        return
    rows = as_rows(said.judgement)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in rows[0]:
        is_number = column in ("value", "95 % interval", "margin")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=column != "verdict")
    for row in rows:
        style = "red" if row["verdict"].startswith("fail") else None
        table.add_row(*row.values(), style=style)
    console.print(
        f"{said.about['run']}  {said.about['model']}  export {said.about['export_digest'][:12]}", soft_wrap=True
    )
    console.print(table)
    for name, found in said.beside.items():
        title = page.BESIDE[name]
        console.print(f"{title}: {number(found.value, 's')} {interval(found, 's')}, no limit", soft_wrap=True)
    failed = said.judgement.failed
    named = "; ".join(line.kind.title for line in failed)
    console.print(f"\nverdict: {said.judgement.outcome}{f': {named}' if failed else ''}", style="bold", soft_wrap=True)
    console.print(f"Also written to {PAGE}", soft_wrap=True)


def _line_as_json(line: Line) -> dict[str, Any]:
    found = _measured_as_json(line.measured) if line.measured else {"value": None}
    limit = {"side": line.kind.side, "limit": line.limit, "unit": line.kind.unit}
    margin = page.finite(line.margin)
    return {**found, **limit, "margin": margin, "pass": line.is_kept if line.is_judged else None, "said": line.outcome}


def _measured_as_json(found: Measured) -> dict[str, Any]:
    return {key: page.finite(value) if isinstance(value, float) else value for key, value in asdict(found).items()}
