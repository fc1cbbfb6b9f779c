"""Renders a record: what a run shows, from a state and its outputs, so that it can be rebuilt. Knows no MLflow.

Results are rendered as images and tables too, if MLflow's UI has a view for them. Data, weights and parquet tables,
which DVC's cache has, are named by their digests, unless `runtime.copy_outs` asks for copies of weights and tables.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from ruamel.yaml import YAML

from gradtrail.stages.common.files import read_json, write_json
from gradtrail.stages.common.params import PARAMS, active_params
from gradtrail.stages.common.pipeline_file import sections_of
from gradtrail.stages.common.stage import Stage
from gradtrail.stages.data.data_files import DIGEST_LENGTH
from gradtrail.tracking.names import (
    COMPILED,
    FIGURES,
    SMALL_FIGURE,
    best_values,
    is_hidden_spread,
    is_logged,
    metric_name,
    rounded,
    run_metrics,
    run_name,
)
from gradtrail.tracking.record import ATTEMPT, FINISHED, MODEL, Dataset, Record, RunInfo, own_store
from gradtrail.tracking.state import State
from gradtrail.tracking.tags import (
    DATASET,
    DATASET_DIGEST,
    IMAGES,
    REBUILT,
    START,
    environment_tags,
    output_tags,
    param_text,
    stage_params,
    state_tags,
)

if TYPE_CHECKING:
    import pandas as pd  # which stages without tables do not import

CURVE_POINTS = 200
EXPORT = "models/export"  # the output that becomes a model
LINEAGE, DIFF, SUMMARY = "lineage.json", "git.diff", "results/summary.md"  # artifacts
_STEP_METRICS = ("loss", "grad_norm", "learning_rate", "loss_scale")
_GALLERIES = {  # image → the group of charts that shows it
    "samples": "data",
    "mistakes": "eval",
    **dict.fromkeys(("largest", "suspects_train", "suspects_test"), "gradients"),
}
_RANKED = {"predictions": "loss", "scores": "grad_norm"}  # table of all examples → the column that ranks its rows


def describe(
    record: Record,
    stage: State,
    tags: Mapping[str, str],
    environment: Mapping[str, Any] | None = None,
    began: float | None = None,
) -> RunInfo:
    """Write what is known of a run before its outputs: name, tags, params and lineage.

    Args:
        tags: Process, commit and experiment.
        environment: Environment of the process, as `environment` returns it; None for a run that is rebuilt.
        began: Start in seconds since the epoch; by default now.
    """
    _write_lineage(record, stage)
    sections = [sections_of(stage.entry(name).params) for name in stage.lineage]
    with (record.artifacts / PARAMS).open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump({key: value for section in sections for key, value in section.items()}, file)
    made_tags: dict[str, str | None] = {REBUILT: "true"}
    if environment:
        write_json(record.folder / ATTEMPT / "environment.json", environment)
        made_tags = {**environment_tags(environment), REBUILT: None}
    info = RunInfo(
        store=own_store(),
        experiment=stage.experiment,
        stage=stage.name,
        state=stage.state,
        name=run_name(stage),
        tags={**state_tags(stage), **tags, **made_tags},
        params={key: param_text(value) for key, value in active_params(stage_params(stage)).items()},
        began=began or time.time(),
    )
    record.write(info)
    return info


def add_outs(record: Record, info: RunInfo, stage: State, outs: Mapping[str, str]) -> RunInfo:
    """Add the outputs of a stage, which its folder has, and their digests: curves, results, tables, data sets."""
    metrics, folder = stage.read_metrics(), stage.folder / "results" / stage.name
    name, digest = metrics["dataset"], metrics["dataset_digest"][:DIGEST_LENGTH]
    curves = read_curves(folder, stage.name, metrics)
    single = run_metrics(stage.name, metrics) | best_values(curves)
    record.add_points({key: {0: value} for key, value in single.items()} | curves)  # the curve of two of one name
    _add_results(record, folder, tables=stage.runtime.copy_outs)
    for out in stage.spec.outs:
        path = stage.folder / out
        if out.endswith(".html"):
            record.copy(path, path.name)
        elif stage.runtime.copy_outs and out.startswith("models/") and path.is_file():  # not the folder of the epochs
            record.copy(path, f"models/{path.name}")
    if EXPORT in stage.spec.outs:
        shutil.copytree(stage.folder / EXPORT, record.folder / MODEL)
    if stage.name in FIGURES and (figure := folder / FIGURES[stage.name][0]).is_file():
        # On a screen of 1,280 pixels; MLflow's UI does not scale figures
        _save_small(figure, (680, 10_000), record.artifacts / SMALL_FIGURE)
    _write_lineage(record, stage, outs)
    tags: dict[str, str | None] = {DATASET: name, DATASET_DIGEST: digest, **output_tags(stage, outs)}
    if (start := folder / "start.json").is_file():  # of a training from weights
        tags[START] = read_json(start)["md5"]
    if any(record.artifacts.glob("images/*")):
        tags[IMAGES] = "True"
    is_split = any(dep.startswith("data/processed") for dep in stage.spec.deps)
    # MLflow keeps the first source of a name and digest, that of `fetch`
    dataset = Dataset(
        name=f"{name} splits" if is_split and stage.experiment == "data" else name,
        digest=digest,
        uri="data/processed" if is_split else "data/raw",
        context="training" if stage.name == "train" else stage.name,
    )
    tables, tags = _add_tables(record, folder), info.tags | tags
    return dataclasses.replace(info, tags=tags, outs=dict(outs), datasets=[dataset], tables=tables, status=FINISHED)


def is_referenced(stage: Stage, out: str) -> bool:
    """Whether a run has only the digest of a file or folder."""
    is_copied = out == EXPORT or stage.runtime.copy_outs
    return out.startswith("data/") or (out.startswith("models/") and not is_copied)


def read_curves(folder: Path, stage: str, metrics: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Read the curves of a stage from its folder of results, if it has any."""
    noise = folder / "noise_scale.csv"
    if not (noise.is_file() or (folder / "epochs.csv").is_file()):
        return {}
    import pandas as pd

    if noise.is_file():
        table = pd.read_csv(noise)
        by_epoch = {name: (table["epoch"], table[name]) for name in ("noise_scale", "sharpness")}
        return _finite({metric_name(stage, name): values for name, values in by_epoch.items()})
    epochs, steps = pd.read_csv(folder / "epochs.csv"), pd.read_parquet(folder / "steps.parquet")
    result = curves(epochs, steps, metrics["planned_steps"])
    if "skipped" in steps and is_logged(stage, "skipped_steps", metrics):
        skipped = steps["skipped"].to_numpy().reshape(len(epochs), -1).sum(axis=1)
        result[metric_name(stage, "skipped_steps")] = dict(enumerate(map(float, skipped.cumsum()), start=1))
    if "epsilon_each" in metrics and "train/epsilon" in result:  # the metric `epsilon` is of all members together
        result["train/epsilon_each"] = result.pop("train/epsilon")
    return result


def curves(epochs: pd.DataFrame, steps: pd.DataFrame, planned_steps: int) -> dict[str, dict[int, float]]:
    """Return the metrics of epochs by epoch, and those of about 200 of the planned steps by step, if finite."""
    sampled = steps[steps["step"] % max(1, planned_steps // CURVE_POINTS) == 0]
    shown_of_epochs = [name for name in epochs.columns.drop("epoch") if not is_hidden_spread("train", name, epochs)]
    by_epoch = {metric_name("train", name): (epochs["epoch"], epochs[name]) for name in shown_of_epochs}
    by_step = {f"steps/{name}": (sampled["step"], sampled[name]) for name in _STEP_METRICS if name in sampled}
    return _finite(by_epoch | by_step)


def _finite(columns: Mapping[str, tuple[pd.Series, pd.Series]]) -> dict[str, dict[int, float]]:
    return {
        name: {int(step): float(value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)}
        for name, (steps, values) in columns.items()
    }


def _add_results(record: Record, folder: Path, *, tables: bool) -> None:
    """Copy a stage's folder of results, parquet files if `tables`; galleries are also images that the UI compares."""
    for path in folder.rglob("*"):
        if path.is_file() and (tables or path.suffix != ".parquet"):  # which a browser does not show
            record.copy(path, f"results/{path.relative_to(folder)}")
    for name, group in _GALLERIES.items():
        if (path := folder / f"{name}.png").is_file():
            # The names that `MlflowClient.log_image` gives; without time and random digits an attempt replaces its own
            image = f"images/{group}~{name}+step+0+timestamp+0+{name}"
            record.copy(path, f"{image}.png")
            _save_small(path, (256, 256), record.artifacts / f"{image}+compressed.webp")  # as MLflow's own


def _add_tables(record: Record, folder: Path) -> list[str]:
    """Write results as tables that MLflow's UI shows; return the paths of all tables, the first of which opens."""
    compiled = [f"compile/{path.name}" for path in sorted((record.artifacts / COMPILED.parent).glob("*.json"))]
    tables = sorted(folder.glob("*.csv"))
    if not tables:
        return compiled
    import pandas as pd

    frames = {path.stem: pd.read_csv(path) for path in tables}
    for name, column in _RANKED.items():
        if (path := folder / f"{name}.parquet").is_file():
            examples = pd.read_parquet(path)
            frames[f"{name}_by_{column}"] = examples.nlargest(1000, column)  # as many as a browser can sort
    (record.artifacts / "tables").mkdir(exist_ok=True)
    for name, frame in frames.items():
        table = frame.map(lambda value: rounded(value) if isinstance(value, float) else value)
        path = record.artifacts / "tables" / f"{name}.json"
        path.write_text(table.to_json(orient="split", index=False), encoding="utf-8")
    return [*sorted(f"tables/{name}.json" for name in frames), *compiled]


def _write_lineage(record: Record, stage: State, outs: Mapping[str, str] | None = None) -> None:
    lineage = stage.describe_lineage()
    if outs is not None:
        lineage[stage.name]["outs"] = dict(outs)
    write_json(record.artifacts / LINEAGE, lineage)


def _save_small(image: Path, box: tuple[int, int], path: Path) -> None:
    small = Image.open(image).convert("RGB")
    small.thumbnail(box)
    small.save(path)
