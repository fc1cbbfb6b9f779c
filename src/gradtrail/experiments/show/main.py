"""`gradtrail show`: the lineage of a run down to the raw data, its outputs, and the commands that restore them."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run
from rich.text import Text
from rich.tree import Tree

from gradtrail.experiments.show.restore import restore_options
from gradtrail.stages.common.dvc_cache import is_here, listing
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import (
    Entry,
    StageSpec,
    contains_path,
    is_code,
    read_pipelines,
    upstream_stages,
)
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.tracking.lineage.state import state_key
from gradtrail.tracking.lookup.runs import look_up
from gradtrail.tracking.mlflow.artifacts import download
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.search import RunIndex
from gradtrail.tracking.mlflow.tags import flat_params, outputs, param_text

_SHORT = 12  # digits of a state or an id in the output
_FIRST_METRICS = ("eval/accuracy", "train/validation_accuracy", "train/loss", "train/epsilon")
Lineage = Mapping[str, Mapping[str, Any]]


def show(word: str, place: Path) -> int:
    """Print the lineage of a run, its outputs, and how to restore them; return the exit status.

    Args:
        word: Name, id, state, experiment or file of a run; see `look_up`. Several matches are listed, with status 2.
        place: Folder that a path is relative to.

    Raises:
        UserError: No run matches.
    """
    client = open_store()
    index = RunIndex(client)
    console = stdout_console()
    matches = look_up(word, index.runs(), place)
    if len(matches) > 1:
        console.print(f"{word}: {len(matches)} runs; which one?", soft_wrap=True)
        for run in matches:
            line = f"  gradtrail show {run.info.run_id[:_SHORT]}   {_one_line(run)}"
            console.print(line, soft_wrap=True)
        return 2
    (run,) = matches
    lineage = _lineage(run, _artifact(client, run, "lineage.json"))
    diff = _artifact(client, run, "git.diff") if run.data.tags.get("git.dirty") == "true" else ""
    by_state = {other.data.tags.get("state", ""): other for other in index.runs()}
    for line in _head(run, index, diff):
        console.print(line, soft_wrap=True)
    console.print(_chain(run, lineage, by_state))
    for title, lines in (
        ("differs from params.yaml", list(_changed_params(lineage))),
        ("wrote", list(_written(run))),
        ("restore it", list(_restore_commands(run, diff))),
    ):
        if lines:
            console.print(f"\n{title}", style="bold")
            for line in lines:
                console.print(f"  {line}", soft_wrap=True)
    return 0


def _one_line(run: Run) -> str:
    tags, metrics = run.data.tags, run.data.metrics
    headlines = [f"{name} {metrics[name]:.4g}" for name in _FIRST_METRICS if name in metrics]
    origin = [tags[name][:_SHORT] for name in ("dvc.exp_name", "mlflow.source.git.commit") if name in tags]
    began = datetime.fromtimestamp(run.info.start_time / 1000).strftime("%Y-%m-%d %H:%M")
    return "  ".join([run.info.run_name, began, run.info.status, *origin, *headlines])


def _head(run: Run, index: RunIndex, diff: str) -> Iterator[str]:
    tags = run.data.tags
    yield _one_line(run)
    yield f"  run        {run.info.run_id}"
    yield f"  state      {tags['state']}"
    if commit := tags.get("mlflow.source.git.commit"):
        changes = ", with changes: artifact git.diff" if diff else ", with changes that were not recorded"
        yield f"  commit     {commit}{changes if tags.get('git.dirty') == 'true' else ''}"
    if name := tags.get("dvc.exp_name"):
        yield f"  experiment {name}, of {tags.get('dvc.exp_baseline', 'an unknown baseline')[:_SHORT]}"
    for child in index({"train_state": tags["state"]}):
        yield f"  child      {child.info.run_id[:_SHORT]}  {child.info.run_name}"


def _chain(run: Run, lineage: Lineage, by_state: Mapping[str, Run]) -> Tree:
    """Return the tree of stages behind a run, with the data that each stage read."""
    pipeline = read_pipelines(Path())
    drawn: set[str] = set()

    def branch(name: str, tree: Tree) -> None:
        entry = lineage[name]
        state = state_key(name, Entry(cmd=entry["cmd"], params=entry["params"], deps=entry["deps"]))
        stage_run = by_state.get(state)
        run_text = f"run {stage_run.info.run_id[:_SHORT]}" if stage_run else "no run"
        node = tree.add(Text(f"{name}  state {state[:_SHORT]}  {run_text}"))
        if name in drawn:
            node.add(Text("see above"))
            return
        drawn.add(name)
        data = {dep: md5 for dep, md5 in entry["deps"].items() if not is_code(dep)}
        for dep, md5 in data.items():
            node.add(Text(f"{dep}  {md5}"))
        upstream = _upstream(name, pipeline, lineage)
        for stage in upstream:
            branch(stage, node)
        if not upstream:
            for line in _raw_data(run, name, pipeline, lineage):
                node.add(Text(line))

    tree = Tree(Text("\nmade by"), guide_style="dim")
    branch(run.data.tags["stage"], tree)
    return tree


def _upstream(name: str, pipeline: Mapping[str, StageSpec], lineage: Lineage) -> list[str]:
    """Return the stages directly before a stage in the current pipeline, the last first."""
    stages = upstream_stages(name, pipeline) if name in pipeline else []
    return [stage for stage in reversed(stages) if stage in lineage]


def _raw_data(run: Run, name: str, pipeline: Mapping[str, StageSpec], lineage: Lineage) -> Iterator[str]:
    """Yield the data set of a first stage, and its files that later stages read."""
    yield f"{run.data.tags.get('dataset')}, sha256 {run.data.tags.get('dataset_digest')}"
    outs = pipeline[name].outs if name in pipeline else ()
    read = {dep: md5 for entry in lineage.values() for dep, md5 in entry["deps"].items()} | outputs(run.data.tags)
    for path, md5 in read.items():
        if any(contains_path(out, path) for out in outs):
            yield from (f"{path}/{file}  {digest}" for file, digest in (listing(md5) or {}).items())


def _changed_params(lineage: Lineage) -> Iterator[str]:
    """Yield the params that differ from `params.yaml`."""
    now = read_yaml(Path("params.yaml"))
    for entry in lineage.values():
        then = flat_params(Entry(cmd="", params=dict(entry["params"]), deps={}))
        live = flat_params(Entry(cmd="", params={"params.yaml": now}, deps={}))
        for key, value in then.items():
            if value != live.get(key):
                yield f"{key}: {param_text(value)}, now {param_text(live.get(key))}"


def _written(run: Run) -> Iterator[str]:
    for out, md5 in outputs(run.data.tags).items():
        note = "" if out.startswith("results/metrics/") or is_here(out, md5) else "   not in DVC's cache"
        yield f"{out}  {md5}{note}"


def _restore_commands(run: Run, diff: str) -> Iterator[str]:
    options = restore_options(run, diff)
    for option in options:
        yield f"{' && '.join(option.commands)}   # {option.source}" if option.commands else f"# {option.source}"
    if not options:
        yield "# in no commit, experiment or lock; the digests above name the files"


def _lineage(run: Run, text: str) -> Lineage:
    """Return the content of a run's `lineage.json`, stage → command, params and deps."""
    if not text:
        raise UserError(f"{run.info.run_id}: its artifact lineage.json is missing")
    lineage: Lineage = json.loads(text)
    return lineage


def _artifact(client: MlflowClient, run: Run, name: str) -> str:
    """Return the text of an artifact; empty if the run has no such artifact."""
    with tempfile.TemporaryDirectory() as folder:
        path = download(client, run.info.run_id, name, Path(folder))
        return path.read_text(encoding="utf-8", errors="replace") if path else ""
