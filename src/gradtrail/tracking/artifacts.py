"""The curves and files of a run; results are logged as images and tables too, if MLflow's UI has a view for them."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
from PIL import Image

from gradtrail.stages.common.files import read_json
from gradtrail.support.errors import UserError
from gradtrail.tracking.names import SMALL_FIGURE, is_hidden_spread, metric_name, rounded
from gradtrail.tracking.tags import TABLES

if TYPE_CHECKING:
    from mlflow import MlflowClient

CURVE_POINTS = 200
_SMALL_WIDTH = 680  # pixels on the page of a run, on a screen of 1,280
_STEP_METRICS = ("loss", "grad_norm", "learning_rate", "loss_scale")
_GALLERIES = {  # image → the group of charts that shows it
    "samples": "data",
    "mistakes": "eval",
    **dict.fromkeys(("largest", "suspects_train", "suspects_test"), "gradients"),
}
_MAX_TABLE_ROWS = 1000  # rows that a browser can still sort
_RANKED = {"predictions": "loss", "scores": "grad_norm"}  # table of all examples → the column that ranks its rows
Curves = dict[str, dict[int, float]]  # name → step → value


def download(client: MlflowClient, run_id: str, path: str, folder: Path) -> Path | None:
    """Download an artifact of a run into a folder; return None if the run has none at this path."""
    if path not in {artifact.path for artifact in client.list_artifacts(run_id, path.rpartition("/")[0] or None)}:
        return None
    return Path(client.download_artifacts(run_id, path, str(folder)))


def read_artifact(client: MlflowClient, run_id: str, path: str) -> str:
    """Return the text of an artifact of a run; empty if the run has none at this path."""
    with tempfile.TemporaryDirectory() as folder:
        file = download(client, run_id, path, Path(folder))
        return file.read_text(encoding="utf-8", errors="replace") if file else ""


def read_curves(folder: Path, stage: str, metrics: Mapping[str, Any]) -> Curves:
    """Read the curves of a stage from its folder of results, if it has any."""
    with _readable(folder):
        if (noise := folder / "noise_scale.csv").is_file():
            table = pd.read_csv(noise)
            return _finite({metric_name(stage, "noise_scale"): (table["epoch"], table["noise_scale"])})
        if not (folder / "epochs.csv").is_file():
            return {}
        epochs, steps = pd.read_csv(folder / "epochs.csv"), pd.read_parquet(folder / "steps.parquet")
        result = curves(epochs, steps, metrics["planned_steps"])
    if "epsilon_each" in metrics and "train/epsilon" in result:  # the metric `epsilon` is of all members together
        result["train/epsilon_each"] = result.pop("train/epsilon")
    return result


def curves(epochs: pd.DataFrame, steps: pd.DataFrame, planned_steps: int) -> Curves:
    """Return the metrics of epochs by epoch, and those of about 200 of the planned steps by step, if finite."""
    sampled = steps[steps["step"] % max(1, planned_steps // CURVE_POINTS) == 0]
    shown_of_epochs = [name for name in epochs.columns.drop("epoch") if not is_hidden_spread("train", name, epochs)]
    by_epoch = {metric_name("train", name): (epochs["epoch"], epochs[name]) for name in shown_of_epochs}
    by_step = {f"steps/{name}": (sampled["step"], sampled[name]) for name in _STEP_METRICS if name in sampled}
    return _finite(by_epoch | by_step)


def _finite(columns: Mapping[str, tuple[pd.Series, pd.Series]]) -> Curves:
    return {
        name: {int(step): float(value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)}
        for name, (steps, values) in columns.items()
    }


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Raise UserError, one line, if results cannot be read, such as those of a commit with other tables."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        raise UserError(f"{folder}: damaged, or of another version: {error!r}"[:400]) from None


def log_results(client: MlflowClient, run_id: str, folder: Path, costs: Path, *, tables: bool) -> None:
    """Log a stage's folder of results, parquet files if `tables`, in place of those of an earlier attempt."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (tables or path.suffix != ".parquet"):  # which a browser does not show
            under = Path("results") / path.parent.relative_to(folder)
            client.log_artifact(run_id, str(path), under.as_posix())

    # Galleries are images, which the UI compares side by side: once, as images do not replace each other.
    paths = {f"{group}/{name}": folder / f"{name}.png" for name, group in _GALLERIES.items()}
    existing = {key: path for key, path in paths.items() if path.is_file()}
    if existing and not client.list_artifacts(run_id, "images"):
        for key, path in existing.items():
            client.log_image(run_id, Image.open(path).convert("RGB"), key=key, step=0)

    # Tables for the UI: not by MLflow's `log_table`, which would append to the table of an earlier attempt.
    with _readable(folder):
        frames = {path.stem: pd.read_csv(path) for path in sorted(folder.glob("*.csv"))}
        for name, column in _RANKED.items():
            if (path := folder / f"{name}.parquet").is_file():
                frames[f"{name}_by_{column}"] = pd.read_parquet(path).nlargest(_MAX_TABLE_ROWS, column)
        if costs.is_file():
            frames["functions"] = pd.DataFrame([{"function": name, **cost} for name, cost in read_json(costs).items()])
    for name, full in frames.items():
        table = full.map(lambda value: rounded(value) if isinstance(value, float) else value)
        client.log_dict(run_id, json.loads(table.to_json(orient="split", index=False)), f"tables/{name}.json")
    announce_tables(client, run_id, [f"tables/{name}.json" for name in frames])


def log_small_figure(client: MlflowClient, run_id: str, path: Path) -> None:
    """Log a figure at the size that fits beside the panels of the UI, which does not scale figures."""
    image = Image.open(path).convert("RGB")
    image.thumbnail((_SMALL_WIDTH, image.height))
    with tempfile.TemporaryDirectory() as folder:
        image.save(Path(folder) / SMALL_FIGURE)
        client.log_artifact(run_id, str(Path(folder) / SMALL_FIGURE))


def announce_tables(client: MlflowClient, run_id: str, paths: Iterable[str]) -> None:
    """Add artifacts to those that the UI shows as tables; the first one opens."""
    before = client.get_run(run_id).data.tags.get(TABLES, "[]")
    announced = {table["path"] for table in json.loads(before)}
    after = json.dumps([{"path": path, "type": "table"} for path in sorted(announced | {*paths})])
    if after != before:
        client.set_tag(run_id, TABLES, after)
