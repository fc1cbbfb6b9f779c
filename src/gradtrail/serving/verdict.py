"""`gradtrail verdict RUN`: whether an exported model satisfies the limits of `deploy/slo.yaml`, and by how much.

A limit passes only if the worse end of the 95 % interval satisfies it. A number on the good side of its limit whose
interval crosses it is inconclusive, which counts as a failure: more data or a quieter machine may decide it. A limit
without a number fails, too.
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradtrail.core.intervals import Interval, median_interval, share_interval
from gradtrail.serving.candidate import Candidate, find_candidate, find_champion, paired_predictions
from gradtrail.serving.probe import WARM, measure
from gradtrail.serving.slo import Limits, read_slo
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import TextTable
from gradtrail.tracking.artifacts import announce_tables
from gradtrail.tracking.names import metric_name
from gradtrail.tracking.registry_history import keep_registry
from gradtrail.tracking.store import open_store
from gradtrail.tracking.tags import VERDICT

ARTIFACT = "verdict/verdict.json"
PASS, FAIL = "pass", "fail"
AT_LEAST = {"accuracy_lower_bound", "worst_class_recall", "agreement", "images_per_second"}  # others: at most
_METRICS = {  # limit → metric of the stage `export`, and the method of its interval
    "accuracy_lower_bound": ("accuracy", "Wilson"),
    "calibration_error": ("expected_calibration_error", "pivotal bootstrap over examples"),
    "worst_class_recall": ("worst_class_recall", "Wilson"),
}
_NOT_JUDGED = "not judged"
_TABLE = "tables/verdict.json"


@dataclass(frozen=True, kw_only=True)
class Measured(Interval):
    """A number with its 95 % interval; an end is infinite if the interval has none."""

    how: str  # method of the measurement and its interval
    values: Sequence[float] = ()  # values of the processes, if several measured it


def verdict(run: str, slo: Path, *, as_json: bool, measured: Callable[..., dict[str, list[float]]] = measure) -> int:
    """Judge the export of a run, see `find_run`; print the verdict, and log it to the run.

    Args:
        slo: File with the limits.
        measured: Function that measures the export in a folder; returns the values of the processes by limit.

    Returns:
        The exit status: 0 for pass, 1 for fail.
    """
    limits = read_slo(slo).limits
    candidate = find_candidate(run, open_store())
    recorded = _recorded(candidate) | {"agreement": _agreement(candidate)}
    times = {name: median_of(values) for name, values in measured(candidate.export.folder).items()}
    rows = judge(limits, recorded | times)
    failed = [name for name, row in rows.items() if row["pass"] is False]
    content: dict[str, Any] = {
        "verdict": FAIL if failed else PASS,
        "run": candidate.name,
        "run_id": candidate.run.info.run_id,
        "model": candidate.manifest.model,
        "dataset": candidate.manifest.dataset,
        "export_digest": candidate.export.digest,
        "limits_file": str(slo),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "limits": rows,
    }
    cells = [as_texts(name, row) for name, row in rows.items()]

    # MLflow gets the JSON, the table, and last the tag, which `promote` reads.
    client, run_id = candidate.client, candidate.run.info.run_id
    client.log_dict(run_id, content, ARTIFACT)
    client.log_dict(run_id, {"columns": [*cells[0]], "data": [[*row.values()] for row in cells]}, _TABLE)
    announce_tables(client, run_id, [_TABLE])
    client.set_tag(run_id, VERDICT, verdict_tag(content["verdict"], candidate.export.digest, limits))
    keep_registry(client)

    console = stdout_console()
    if as_json:
        console.print(json.dumps(content, indent=2, ensure_ascii=False), soft_wrap=True)
        return 1 if failed else 0
    styles = ["red" if row["verdict"].startswith(FAIL) else None for row in cells]
    right = ("value", "95 % interval", "margin")
    console.print(f"{candidate.name}  {content['model']}  export {candidate.export.digest[:12]}", soft_wrap=True)
    console.print(TextTable("", cells, right=right, styles=styles))
    reasons = f": {', '.join(failed)}" if failed else ""
    console.print(f"\nverdict: {content['verdict']}{reasons}", style="bold", soft_wrap=True)
    return 1 if failed else 0


def verdict_tag(outcome: str, export: str, limits: Limits) -> str:
    """Return a verdict on the export with this digest as the text of one tag, which is written in one step."""
    digest = hashlib.sha256(json.dumps(asdict(limits), sort_keys=True).encode()).hexdigest()
    return f"{outcome}: export {export}, limits {digest}"


def judge(limits: Limits, numbers: Mapping[str, Measured | str]) -> dict[str, dict[str, Any]]:
    """Return the row of each limit: number, interval, limit, margin and outcome, as plain data.

    The margin is the distance from the limit to the worse end of the interval, and negative if the limit fails.
    Infinite numbers are None.

    Args:
        limits: The limits of `deploy/slo.yaml`.
        numbers: The numbers by the name of their limit, or the reason why one is missing; `not judged` excuses it.
    """
    rows = {}
    for name, limit in (vars(limits) | {WARM: None}).items():
        number, side = numbers.get(name, "not measured"), "at least" if name in AT_LEAST else "at most"
        row: dict[str, Any] = {"value": None, "side": side, "limit": limit}
        row |= {"margin": None, "pass": None, "verdict": _NOT_JUDGED}
        if isinstance(number, Measured):
            row |= {key: _finite(value) for key, value in asdict(number).items()}
        if limit is not None and isinstance(number, Measured):
            distances = (number.low - limit, number.high - limit)
            worse, better = sorted(distances if side == "at least" else (-distance for distance in distances))
            row |= {"margin": _finite(worse), "pass": worse >= 0}
            row["verdict"] = PASS if worse >= 0 else FAIL if better < 0 else f"{FAIL}: inconclusive"
        elif limit is not None and str(number).startswith(_NOT_JUDGED):
            row["verdict"] = number
        elif limit is not None:
            row |= {"pass": False, "verdict": f"{FAIL}: not known, {number}"}
        rows[name] = row
    return rows


def median_of(values: Sequence[float]) -> Measured:
    """Return the median of the values of several processes, with its interval."""
    how = f"median of {len(values)} processes, order statistics"
    return Measured(**vars(median_interval(values)), how=how, values=tuple(values))


def _recorded(candidate: Candidate) -> dict[str, Measured | str]:
    """Return the numbers that the files and the metrics of an export hold, by limit."""
    size = sum(path.stat().st_size for path in candidate.export.folder.iterdir()) / 2**20
    numbers: dict[str, Measured | str] = {"size_mib": Measured(value=size, low=size, high=size, how="exact")}
    for limit, (key, how) in _METRICS.items():
        names = [metric_name("export", f"{key}{end}") for end in ("", "_low", "_high")]
        if candidate.export_metrics.keys() >= {*names}:
            value, low, high = (candidate.export_metrics[name] for name in names)
            numbers[limit] = Measured(value=value, low=low, high=high, how=how)
        else:
            numbers[limit] = "the run of `export` has no such metric; `gradtrail sync` rebuilds the run"
    return numbers


def _agreement(candidate: Candidate) -> Measured | str:
    """Return the share of the test split that gets the champion's label, or the reason why it is not known."""
    try:
        champion = find_champion(candidate)
        if champion is None:
            return f"{_NOT_JUDGED}: there is no champion"
        if champion.export.digest == candidate.export.digest:
            return f"{_NOT_JUDGED}: this is the champion"
        _, predicted, by_champion = paired_predictions(candidate, champion)
    except UserError as error:
        return f"no comparison with the champion: {error}"
    return Measured(**vars(share_interval(int((predicted == by_champion).sum()), len(predicted))), how="Wilson")


def as_texts(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a row of `judge`, by the titles of the columns."""
    value = interval = must_be = margin = "–"
    if row["limit"] is not None:
        must_be = f"{row['side']} {_format(row['limit'])}"
    if row["value"] is not None:
        value = _format(row["value"])
        low = "−∞" if row["low"] is None else _format(row["low"])
        high = "∞" if row["high"] is None else _format(row["high"])
        interval = "exact" if row["low"] == row["high"] is not None else f"{low} to {high}"
        if row["margin"] is not None:
            margin = _format(row["margin"], sign="+")
    cells = {"limit": name, "value": value, "95 % interval": interval}
    return cells | {"must be": must_be, "margin": margin, "verdict": row["verdict"]}


def _format(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4g}" if abs(value) < 10_000 else f"{value:{sign},.0f}"


def _finite(value: Any) -> Any:
    """Return a value; None for a number that is infinite, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
