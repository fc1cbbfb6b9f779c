"""`gradtrail show`: DVC's experiments as a table, or the lineage of a run and the commands that restore its outputs."""

import csv
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mlflow.entities import Run

from gradtrail.stages.common.dvc_cache import has_remote, is_here
from gradtrail.stages.common.params import PARAMS, flatten
from gradtrail.stages.common.pipeline_file import dvc_target, is_code
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError
from gradtrail.support.git import git
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import table
from gradtrail.tracking.artifacts import read_artifact
from gradtrail.tracking.lookup import look_up
from gradtrail.tracking.recorded import committed_snapshots, find_experiments, working_snapshot
from gradtrail.tracking.runs import RunIndex
from gradtrail.tracking.state import Identity, Snapshot
from gradtrail.tracking.store import open_store
from gradtrail.tracking.tags import outputs
from gradtrail.tracking.working_diff import is_cut_off

_SHORT = 12  # digits of a state or an id in the output
_FIRST_METRICS = ("eval/accuracy", "train/validation_accuracy", "train/loss", "train/epsilon")
_FOLDER = Path(".gradtrail/restore")  # of the changes to apply
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
    for row in csv.DictReader(io.StringIO(process.stdout)):  # DVC's own table would cut what does not fit
        rev, experiment = row.pop("rev"), row.pop("Experiment", "")
        cells = {key.removeprefix("train.").replace("_accuracy", ""): value for key, value in row.items()}
        rows.append({"experiment": f"  {experiment}" if experiment else rev, **cells})
    metrics = [key for key in rows[0] if key in ("accuracy", "validation")]
    stdout_console().print(table("experiments of this commit", rows, right=metrics, no_wrap=metrics))
    return 0


def show(word: str, place: Path) -> int:
    """Print the lineage of a run, its outputs, and how to restore them; return the exit status.

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
    lineage: Lineage = json.loads(read_artifact(client, run.info.run_id, "lineage.json") or "{}")
    if not lineage:
        raise UserError(f"{run.info.run_id}: its artifact lineage.json is missing")
    diff = read_artifact(client, run.info.run_id, "git.diff")
    for line in _head(run, index):
        console.print(line, soft_wrap=True)
    for title, lines in (
        ("made by", _stages(lineage, run, index)),
        ("differs from params.yaml", _changed_params(lineage)),
        ("wrote", _written(run)),
        ("restore it", _restore(run, diff)),
    ):
        if texts := list(lines):
            console.print(f"\n{title}", style="bold")
            for text in texts:
                console.print(f"  {text}", soft_wrap=True)
    return 0


def _one_line(run: Run) -> str:
    tags, metrics = run.data.tags, run.data.metrics
    headlines = [f"{name} {metrics[name]:.4g}" for name in _FIRST_METRICS if name in metrics]
    origin = [tags[name][:_SHORT] for name in ("dvc.exp_name", "mlflow.source.git.commit") if name in tags]
    began = datetime.fromtimestamp(run.info.start_time / 1000).strftime("%Y-%m-%d %H:%M")
    return "  ".join([run.info.run_name, began, run.info.status, *origin, *headlines])


def _head(run: Run, index: RunIndex) -> Iterator[str]:
    tags = run.data.tags
    yield _one_line(run)
    yield f"  run        {run.info.run_id}"
    yield f"  state      {tags['state']}"
    if commit := tags.get("mlflow.source.git.commit"):
        yield f"  commit     {commit}{' with changes' if tags.get('git.dirty') == 'true' else ''}"
    if name := tags.get("dvc.exp_name"):
        yield f"  experiment {name}, of {tags.get('dvc.exp_baseline', 'an unknown baseline')[:_SHORT]}"
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
    """Yield the params that differ from `params.yaml`."""
    now = flatten(read_yaml(PARAMS))
    for entry in lineage.values():
        for key, value in flatten(entry["params"].get(str(PARAMS), {})).items():
            if value != now.get(key):
                yield f"{key}: {value}, now {now.get(key)}"


def _written(run: Run) -> Iterator[str]:
    for out, md5 in outputs(run.data.tags).items():
        note = "" if out.startswith("results/metrics/") or is_here(out, md5) else "   not in DVC's cache"
        yield f"{out}  {md5}{note}"


def _restore(run: Run, diff: str) -> Iterator[str]:
    """Yield the commands that restore the run's outputs: apply an experiment, or check out a commit and reproduce.

    `dvc repro` takes from the cache what it has, and computes the rest. If a `dvc.lock` of the working folder, of an
    experiment or of a commit records the state, no more is needed; otherwise the run's commit with its changes is.
    """
    stage = run.data.tags["stage"]
    target = dvc_target(stage)
    verb = "dvc" if target == stage else "gradtrail"  # DVC alone does not see an optional pipeline that never ran
    repro = f"{verb} repro {'--pull ' if has_remote() else ''}{shlex.quote(target)}"

    working = working_snapshot()
    if working and _records(working, run):
        identity = Identity(stage, from_lock=True, snapshot=working)
        is_complete = all(identity.has_outs_of_lock(name) for name in identity.lineage)
        yield "# nothing to do: the working folder has it" if is_complete else repro
        return
    # Local changes are put aside, as a checkout or an applied diff would mix with them
    stash = "git stash --include-untracked && " if git("status", "--porcelain") else ""
    recorded = [snapshot for snapshot in committed_snapshots()[0] if _records(snapshot, run)]
    if recorded and (experiment := recorded[-1].experiment):
        is_unique = [other.name for other in find_experiments()].count(experiment.name) == 1
        yield f"{stash}dvc exp apply {shlex.quote(experiment.name) if is_unique else experiment.commit[:_SHORT]}"
        return
    commit = recorded[-1].commit if recorded else run.data.tags.get("mlflow.source.git.commit", "")
    is_unknown = run.data.tags.get("git.dirty") == "true" and (not diff or is_cut_off(diff))
    if not git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") or (is_unknown and not recorded):
        yield "# in no commit, experiment or lock; the digests above name the files"
    elif recorded or "diff --git " not in diff:
        yield f"{stash}git checkout {commit[:_SHORT]} && {repro}"
    else:
        fetch = f"mlflow artifacts download -r {run.info.run_id} -a git.diff -d {_FOLDER}"
        yield f"{stash}git checkout {commit[:_SHORT]} && {fetch} && git apply {_FOLDER}/git.diff && {repro}"


def _records(snapshot: Snapshot, run: Run) -> bool:
    """Whether a `dvc.lock` records the run's state, with the run's outputs: other machines may make others of it."""
    stage = Identity(run.data.tags["stage"], from_lock=True, snapshot=snapshot)
    if stage.name not in snapshot.pipeline or not stage.is_sound or stage.state != run.data.tags["state"]:
        return False
    return outputs(run.data.tags) in ({}, stage.out_digests())
