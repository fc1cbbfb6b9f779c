"""`gradtrail show`: from a row of MLflow to the files behind it, down to the raw data, and back."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from rich.text import Text
from rich.tree import Tree

from gradtrail.experiments.show.lookup import look_up, outputs
from gradtrail.experiments.show.restore import ways_to
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import (
    Entry,
    StageSpec,
    contains_path,
    is_code,
    read_pipeline,
    upstream_stages,
)
from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.tracking.lineage.dvc_cache import is_here, listing
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.search import RunIndex
from gradtrail.tracking.mlflow.tags import flat_params, shown

_SHORT = 12  # digits of a key that tell one from another
_HEADLINES = ("eval/accuracy", "train/validation_accuracy", "train/loss")
Lineage = Mapping[str, Mapping[str, Any]]


def show(what: str) -> int:
    """Print what a row is made of, what it wrote, and how its files come back; return the exit status.

    Args:
        what: see `look_up`. Where several rows are meant they are listed, and the status is 2.

    Raises:
        UserError: none is meant; one line.
    """
    client = open_store()
    index = RunIndex(client)
    console = stdout_console()
    found = look_up(what, index.runs())
    if len(found) > 1:
        console.print(f"{what}: {len(found)} rows; which one?", markup=False, soft_wrap=True)
        for row in found:
            console.print(
                f"  gradtrail show {row.info.run_id[:_SHORT]}   {_one_line(row)}", markup=False, soft_wrap=True
            )
        return 2
    (row,) = found
    lineage = json.loads(_artifact(client, row, "lineage.json") or "{}")
    if row.data.tags["stage"] not in lineage:
        raise UserError(f"{row.info.run_id}: its artifact lineage.json is missing or damaged")
    diff = _artifact(client, row, "git.diff") if row.data.tags.get("git.dirty") == "true" else ""
    by_state = {each.data.tags.get("state", ""): each for each in index.runs()}
    for line in _head(row, index, diff):
        console.print(line, markup=False, soft_wrap=True)
    console.print(_chain(row, lineage, by_state))
    for title, lines in (
        ("differs from params.yaml", list(_changed_params(lineage))),
        ("wrote", list(_written(row))),
        ("restore it", list(_restoring(row, diff))),
    ):
        if lines:
            console.print(f"\n{title}", style="bold")
            for line in lines:
                console.print(f"  {line}", markup=False, soft_wrap=True)
    return 0


def _one_line(row: Run) -> str:
    tags, metrics = row.data.tags, row.data.metrics
    figures = [f"{name} {metrics[name]:.4g}" for name in _HEADLINES if name in metrics]
    origin = [tags[name][:_SHORT] for name in ("dvc.exp_name", "mlflow.source.git.commit") if name in tags]
    began = datetime.fromtimestamp(row.info.start_time / 1000).strftime("%Y-%m-%d %H:%M")
    return "  ".join([row.info.run_name, began, row.info.status, *origin, *figures])


def _head(row: Run, index: RunIndex, diff: str) -> Iterator[str]:
    tags = row.data.tags
    yield _one_line(row)
    yield f"  run        {row.info.run_id}"
    yield f"  state      {tags['state']}"
    if commit := tags.get("mlflow.source.git.commit"):
        changes = ", with changes: artifact git.diff" if diff else ", with changes that nothing here has"
        yield f"  commit     {commit}{changes if tags.get('git.dirty') == 'true' else ''}"
    if name := tags.get("dvc.exp_name"):
        yield f"  experiment {name}, of {tags.get('dvc.exp_baseline', 'an unknown baseline')[:_SHORT]}"
    for child in index({"train_state": tags["state"]}):
        yield f"  below it   {child.info.run_id[:_SHORT]}  {child.info.run_name}"


def _chain(row: Run, lineage: Lineage, by_state: Mapping[str, Run]) -> Tree:
    """Return the stages that led to a row, each with the data that it read."""
    pipeline = read_pipeline()
    seen: set[str] = set()

    def branch(name: str, tree: Tree) -> None:
        entry = lineage[name]
        made = by_state.get(entry["state"])
        run = f"run {made.info.run_id[:_SHORT]}" if made else "no row"
        node = tree.add(Text(f"{name}  state {entry['state'][:_SHORT]}  {run}"))
        if name in seen:
            node.add(Text("see above"))
            return
        seen.add(name)
        data = {dep: md5 for dep, md5 in entry["deps"].items() if not is_code(dep)}
        for dep, md5 in data.items():
            node.add(Text(f"{dep}  {md5}"))
        before = _makers(name, pipeline, lineage)
        for maker in before:
            branch(maker, node)
        if not before:
            for line in _raw_data(row, name, pipeline, lineage):
                node.add(Text(line))

    tree = Tree(Text("\nmade by"), guide_style="dim")
    branch(row.data.tags["stage"], tree)
    return tree


def _makers(name: str, pipeline: Mapping[str, StageSpec], lineage: Lineage) -> list[str]:
    """Return the stages right before one, the last first; by the pipeline of today, if it has the stage."""
    return (
        [maker for maker in reversed(upstream_stages(name, pipeline)) if maker in lineage] if name in pipeline else []
    )


def _raw_data(row: Run, name: str, pipeline: Mapping[str, StageSpec], lineage: Lineage) -> Iterator[str]:
    """Yield what a first stage got: the data set, and the files that later ones read of it."""
    yield f"{row.data.tags.get('dataset')}, sha256 {row.data.tags.get('dataset_digest')}"
    outs = pipeline[name].outs if name in pipeline else ()
    read = {dep: md5 for entry in lineage.values() for dep, md5 in entry["deps"].items()} | outputs(row)
    for path, md5 in read.items():
        if any(contains_path(out, path) for out in outs):
            yield from (f"{path}/{file}  {found}" for file, found in (listing(md5) or {}).items())


def _changed_params(lineage: Lineage) -> Iterator[str]:
    """Yield the params that are others in `params.yaml` now."""
    now = read_yaml(Path("params.yaml"))
    for entry in lineage.values():
        then = flat_params(Entry(cmd="", params=dict(entry["params"]), deps={}))
        live = flat_params(Entry(cmd="", params={"params.yaml": now}, deps={}))
        for key, value in then.items():
            if value != live.get(key):
                yield f"{key}: {shown(value)}, now {shown(live.get(key))}"


def _written(row: Run) -> Iterator[str]:
    for out, md5 in outputs(row).items():
        where = "" if out.startswith("metrics/") or is_here(out, md5) else "   not in DVC's cache here"
        yield f"{out}  {md5}{where}"


def _restoring(row: Run, diff: str) -> Iterator[str]:
    ways = ways_to(row, diff)
    for way in ways:
        yield f"{' && '.join(way.commands)}   # {way.about}" if way.commands else f"# {way.about}"
    if not ways:
        yield "# no commit, no experiment and no lock is known that has it; the digests above name the files"


def _artifact(client: MlflowClient, row: Run, name: str) -> str:
    """Return an artifact's text; empty where the row has none of the name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(MlflowException, OSError, ValueError):
        return Path(client.download_artifacts(row.info.run_id, name, folder)).read_text(encoding="utf-8")
    return ""
