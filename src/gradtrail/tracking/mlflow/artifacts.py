"""The curves and files of a run, in the forms that MLflow's UI draws.

Curves are read from the tables of a training's history; results are logged as artifacts, and also as images and tables
if the UI has a view for them.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
from pandas.api.types import is_integer_dtype, is_numeric_dtype
from PIL import Image

from gradtrail.stages.common.files import read_json
from gradtrail.support.errors import UserError, one_line
from gradtrail.tracking.mlflow.naming import SMALL_FIGURE, is_hidden_spread, metric_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

CURVE_POINTS = 200
_SMALL_WIDTH = 680  # pixels on the page of a run, on a screen of 1,280
_STEP_METRICS = ("loss", "grad_norm", "learning_rate", "loss_scale")
_EPSILON, _EPSILON_EACH = "train/epsilon", "train/epsilon_each"
_TABLE = ".parquet"  # suffix of tables of all examples or steps, which a browser does not show
_TABLES_TAG = "mlflow.loggedArtifacts"  # where MLflow's UI looks for tables
_GALLERIES = {  # image → the group of charts that shows it
    "samples": "data",
    "mistakes": "eval",
    **dict.fromkeys(("largest", "suspects_train", "suspects_test", "influence"), "gradients"),
}
_MAX_TABLE_ROWS = 1000  # rows that a browser can still sort
_RANKED = {"predictions": "loss", "scores": "grad_norm"}  # table of all examples → the column that ranks its rows
Curves = dict[str, dict[int, float]]


def download(client: MlflowClient, run_id: str, path: str, folder: Path) -> Path | None:
    """Download an artifact of a run into a folder; return None if the run has none at this path.

    Raises:
        Exception: The store failed; the exception is that of MLflow's client, see `with_store`.
    """
    if path not in {artifact.path for artifact in client.list_artifacts(run_id, path.rpartition("/")[0] or None)}:
        return None
    return Path(client.download_artifacts(run_id, path, str(folder)))


def read_curves(folder: Path, stage: str, metrics: Mapping[str, Any]) -> Curves:
    """Read the curves of a stage from the tables in its folder of results; none if it writes none.

    Raises:
        UserError: A table or its metrics file is not as this version writes it; one line.
    """
    if (noise := folder / "noise_scale.csv").is_file():
        return noise_curves(_read(noise, counts="epoch", numbers=["noise_scale"]), stage)
    if not (folder / "epochs.csv").is_file():
        return {}
    if not isinstance(planned := metrics.get("planned_steps"), int):
        raise UserError(f"results/metrics/{stage}.json: planned_steps should be an integer, got {planned!r}")
    result = curves(*read_tables(folder), planned)
    if "epsilon_each" in metrics:  # the curve is that of one member, the metric `epsilon` of all together
        result = {_EPSILON_EACH if name == _EPSILON else name: curve for name, curve in result.items()}
    return result


def read_tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the tables of epochs and of steps; raise UserError in one line if one is damaged."""
    epochs = _read(folder / "epochs.csv", counts="epoch", numbers=None)
    return epochs, _read(folder / "steps.parquet", counts="step", numbers=_STEP_METRICS)


def _read(path: Path, counts: str = "", numbers: Iterable[str] | None = ()) -> pd.DataFrame:
    """Read a table.

    Args:
        path: Path of the file.
        counts: Name of a required column of integers.
        numbers: Names of optional columns of numbers; None for all columns.

    Raises:
        UserError: It is not a table, lacks the column, or has other values; one line.
    """
    try:
        table = pd.read_parquet(path) if path.suffix == _TABLE else pd.read_csv(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path}: not a table of this project: {one_line(error)[:200]}") from None
    if counts:
        _require_column(table, counts, path)
    checks = {name: is_numeric_dtype for name in table.columns if numbers is None or name in numbers}
    for name, is_wanted in (checks | ({counts: is_integer_dtype} if counts else {})).items():
        if len(table) and not is_wanted(table[name]):
            raise UserError(f"{path}: not a table of this project: column {name!r} is of {table[name].dtype}")
    return table


def _require_column(table: pd.DataFrame, name: str, path: Path) -> None:
    if name not in table:
        raise UserError(f"{path}: not a table of this project: it has no column {name!r}")


def curves(epochs: pd.DataFrame, steps: pd.DataFrame, planned_steps: int) -> Curves:
    """Return name → step → value: the metrics of epochs by epoch, and those of about 200 steps by step.

    Args:
        epochs: Rows of the table of epochs.
        steps: Rows of the table of steps. Values that are not finite, of skipped steps, are left out.
        planned_steps: Number of steps of all planned epochs, which decides which steps are logged.
    """
    sampled = steps[steps["step"] % max(1, planned_steps // CURVE_POINTS) == 0]
    shown_of_epochs = [name for name in epochs.columns.drop("epoch") if not is_hidden_spread("train", name, epochs)]
    by_epoch = {metric_name("train", name): (epochs["epoch"], epochs[name]) for name in shown_of_epochs}
    by_step = {f"steps/{name}": (sampled["step"], sampled[name]) for name in _STEP_METRICS if name in sampled}
    return _finite(by_epoch | by_step)


def noise_curves(noise: pd.DataFrame, stage: str) -> Curves:
    """Return the gradient noise scale over the epochs whose weights were kept, without infinite values."""
    return _finite({metric_name(stage, "noise_scale"): (noise["epoch"], noise["noise_scale"])})


def _finite(columns: Mapping[str, tuple[pd.Series, pd.Series]]) -> Curves:
    return {
        name: {step: value for step, value in zip(numbers, values, strict=True) if math.isfinite(value)}
        for name, (numbers, values) in columns.items()
    }


def log_results(client: MlflowClient, run_id: str, folder: Path, costs: Path, *, tables: bool) -> None:
    """Log the files in a stage's folder of results, which replace those of an earlier attempt.

    Args:
        client: Client of the store.
        run_id: Id of the run.
        folder: Folder of the stage's results.
        costs: File with the static costs of its functions, if there is one.
        tables: True if parquet tables are logged too.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (tables or path.suffix != _TABLE):
            under = Path("results") / path.parent.relative_to(folder)
            client.log_artifact(run_id, str(path), under.as_posix())
    _log_galleries(client, run_id, folder)
    _log_tables(client, run_id, folder, costs)


def log_small_figure(client: MlflowClient, run_id: str, path: Path) -> None:
    """Log a figure at the size that fits beside the panels of the UI, which does not scale figures."""
    image = _read_png(path)
    image.thumbnail((_SMALL_WIDTH, image.height))
    with tempfile.TemporaryDirectory() as folder:
        image.save(Path(folder) / SMALL_FIGURE)
        client.log_artifact(run_id, str(Path(folder) / SMALL_FIGURE))


def _read_png(path: Path) -> Image.Image:
    """Read an image; raise UserError in one line if it is damaged."""
    try:
        with Image.open(path, formats=("PNG",)) as file:
            return file.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path.name}: not readable as PNG: {one_line(error)}") from None


def _log_galleries(client: MlflowClient, run_id: str, folder: Path) -> None:
    """Log galleries as images, which the UI compares side by side; only once, as images do not replace each other."""
    paths = {f"{group}/{name}": folder / f"{name}.png" for name, group in _GALLERIES.items()}
    existing = {key: path for key, path in paths.items() if path.is_file()}
    if existing and not client.list_artifacts(run_id, "images"):
        for key, path in existing.items():
            client.log_image(run_id, _read_png(path), key=key, step=0)


def _log_tables(client: MlflowClient, run_id: str, folder: Path, costs: Path) -> None:
    """Log tables for the UI's table view; not by `log_table`, which would append to those of an earlier attempt."""
    tables = {path.stem: _read(path) for path in sorted(folder.glob("*.csv"))}
    for name, column in _RANKED.items():
        if (path := folder / f"{name}{_TABLE}").is_file():
            table = _read(path, numbers=[column])
            _require_column(table, column, path)
            tables[f"{name}_by_{column}"] = table.nlargest(_MAX_TABLE_ROWS, column, keep="first").round(6)
    if costs.is_file():
        tables["functions"] = _costs_table(costs)
    for name, table in tables.items():
        client.log_dict(run_id, json.loads(table.to_json(orient="split", index=False)), f"tables/{name}.json")
    announce_tables(client, run_id, [f"tables/{name}.json" for name in tables])


def announce_tables(client: MlflowClient, run_id: str, paths: Iterable[str]) -> None:
    """Add artifacts to those that the UI shows as tables; the first one opens."""
    before = client.get_run(run_id).data.tags.get(_TABLES_TAG, "")
    announced: Any = []
    with contextlib.suppress(ValueError):  # people can edit tags
        announced = json.loads(before or "[]")
    announced = announced if isinstance(announced, list) else []
    new = [{"path": path, "type": "table"} for path in paths]
    entries = [*(entry for entry in announced if isinstance(entry, dict) and entry not in new), *new]
    content = json.dumps(sorted(entries, key=lambda table: str(table.get("path"))))
    if content != before and new:
        client.set_tag(run_id, _TABLES_TAG, content)


def _costs_table(path: Path) -> pd.DataFrame:
    """Return a row for each compiled function, with its static costs."""
    costs = read_json(path)
    if strange := [name for name, cost in costs.items() if not isinstance(cost, dict)]:
        raise UserError(f"{path}: {strange[0]} should be a mapping of costs, got {costs[strange[0]]!r}")
    return pd.DataFrame([{"function": name, **cost} for name, cost in costs.items()])
