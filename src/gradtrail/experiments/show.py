"""`gradtrail show`: DVC's experiments as a table, or the lineage of a run and its outputs."""

import csv
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from gradtrail.stages.common.dvc_cache import is_here
from gradtrail.stages.common.params import flatten, read_params
from gradtrail.stages.common.pipeline_file import is_code, sections_of
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import TextTable
from gradtrail.tracking.artifacts import read_artifact
from gradtrail.tracking.find_run import look_up
from gradtrail.tracking.runs import RunIndex
from gradtrail.tracking.store import open_store
from gradtrail.tracking.tags import START_RUN, outputs

_SHORT = 12  # digits of a state or an id in the output
_FIRST_METRICS = ("eval/accuracy", "train/validation_accuracy", "train/loss", "train/epsilon")
# Columns of `dvc exp show` that people do not compare: all but accuracies and changed params
_DROPPED = r"(?!Experiment$|rev$|State$|accuracy$|validation_accuracy$|(fetch|preprocess|train)\.)"
Lineage = Mapping[str, Mapping[str, Any]]  # stage → its state, command, params and deps


def show_experiments() -> int:
    """Print the table of `dvc exp show`, of accuracies and the params that differ; return DVC's exit status."""
    command = [sys.executable, "-m", "dvc", "exp", "show", "--csv", "--precision", "4", "--only-changed"]
    process = subprocess.run([*command, "--drop", _DROPPED], stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        return process.returncode
    rows = []
    for row in csv.DictReader(process.stdout.splitlines()):  # DVC's own table would cut what does not fit
        rev, experiment = row.pop("rev"), row.pop("Experiment", "")
        cells = {key.removeprefix("train.").replace("_accuracy", ""): value for key, value in row.items()}
        rows.append({"experiment": f"  {experiment}" if experiment else rev, **cells})
    metrics = [key for key in rows[0] if key in ("accuracy", "validation")]
    stdout_console().print(TextTable("experiments of this commit", rows, right=metrics))
    return 0


def show(word: str, place: Path) -> int:
    """Print the lineage of a run and its outputs; return the exit status.

    `word` is that of `look_up`; a path is relative to `place`. Several matching runs are listed, with status 2.
    """
    client = open_store()
    index = RunIndex(client)
    console = stdout_console()
    matches = look_up(word, index.runs(), place)
    if len(matches) > 1:
        console.print(f"{word}: {len(matches)} runs; which one?", soft_wrap=True)
        for run in matches:
            console.print(f"  gradtrail show {run.info.run_id[:_SHORT]}   {_one_line(run)}", soft_wrap=True)
        return 2
    (run,) = matches
    lineage = read_lineage(client, run.info.run_id)
    for line in _head(run, index):
        console.print(line, soft_wrap=True)
    for title, lines in (
        ("made by", _stages(lineage, run, index)),
        ("differs from params.yaml", _changed_params(lineage)),
        ("wrote", _written(run)),
        ("restore it", [f"gradtrail checkout {run.info.run_id[:_SHORT]}"]),
    ):
        if texts := list(lines):
            console.print(f"\n{title}", style="bold")
            for text in texts:
                console.print(f"  {text}", soft_wrap=True)
    return 0


def read_lineage(client: MlflowClient, run_id: str) -> Lineage:
    """Return the lineage of a run; raise UserError if it is missing."""
    if text := read_artifact(client, run_id, "lineage.json"):
        lineage: Lineage = json.loads(text)
        return lineage
    raise UserError(f"{run_id}: its artifact lineage.json is missing")


def _one_line(run: Run) -> str:
    tags = run.data.tags
    origin = [tags[name][:_SHORT] for name in ("dvc.exp_name", "mlflow.source.git.commit") if name in tags]
    return "  ".join([_title(run), *origin, *_metrics(run)])


def _title(run: Run) -> str:
    began = datetime.fromtimestamp(run.info.start_time / 1000).strftime("%Y-%m-%d %H:%M")
    return f"{run.info.run_name}  {began}  {run.info.status}"


def _metrics(run: Run) -> Iterator[str]:
    metrics = run.data.metrics
    yield from (f"{name} {metrics[name]:.4g}" for name in _FIRST_METRICS if name in metrics)


def _head(run: Run, index: RunIndex) -> Iterator[str]:
    tags = run.data.tags
    yield _title(run)
    yield from (f"  metric     {text}" for text in _metrics(run))
    yield f"  run        {run.info.run_id}"
    yield f"  state      {tags['state']}"
    if commit := tags.get("mlflow.source.git.commit"):
        yield f"  commit     {commit}{' with changes' if tags.get('git.dirty') == 'true' else ''}"
    if name := tags.get("dvc.exp_name"):
        yield f"  experiment {name}, of {tags.get('dvc.exp_baseline', 'an unknown baseline')[:_SHORT]}"
    if origin := index.get(tags.get(START_RUN, "")):
        yield f"  start      {origin.info.run_id[:_SHORT]}  {origin.info.run_name}"
    for child in index({"train_state": tags["state"]}):
        yield f"  child      {child.info.run_id[:_SHORT]}  {child.info.run_name}"


def _stages(lineage: Lineage, run: Run, index: RunIndex) -> Iterator[str]:
    """Yield the stages behind a run, the first one first, each with its run and the data that it read."""
    yield f"{run.data.tags.get('dataset')}, sha256 {run.data.tags.get('dataset_digest')}"
    for name, entry in lineage.items():
        runs = index({"state": entry["state"]})
        yield f"{name}  state {entry['state'][:_SHORT]}  {f'run {runs[0].info.run_id[:_SHORT]}' if runs else 'no run'}"
        yield from (f"  {dep}  {md5}" for dep, md5 in entry["deps"].items() if not is_code(dep))


def _changed_params(lineage: Lineage) -> Iterator[str]:
    """Yield the params that differ from the params files."""
    now = flatten(read_params())
    for entry in lineage.values():
        for key, value in flatten(sections_of(entry["params"])).items():
            if value != now.get(key):
                yield f"{key}: {value}, now {now.get(key)}"


def _written(run: Run) -> Iterator[str]:
    for out, md5 in outputs(run.data.tags).items():
        note = "" if out.startswith("results/metrics/") or is_here(out, md5) else "   not in DVC's cache"
        yield f"{out}  {md5}{note}"
