"""The curves that MLflow shows of a training, from the tables of its history.

The files of a row as MLflow's UI shows them: results as artifacts, galleries as images, and tables as tables.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import RunTag
from PIL import Image

from gradtrail.tracking.mlflow.naming import metric_name

CURVE_POINTS = 200
_STEP_FIGURES = ("loss", "grad_norm", "learning_rate", "loss_scale")
Curves = dict[str, dict[int, float]]


def read_tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the tables of epochs and of steps."""
    return pd.read_csv(folder / "epochs.csv"), pd.read_parquet(folder / "steps.parquet")


def curves(epochs: pd.DataFrame, steps: pd.DataFrame, planned_steps: int) -> Curves:
    """Return name → step → value: figures of epochs over epochs, and of some 200 of the steps over steps.

    Args:
        epochs: all or some of them.
        steps: all or some of them. What is not finite, of a skipped step, is left out.
        planned_steps: of all epochs asked for, which decides which steps are shown.
    """
    shown = steps[steps["step"] % max(1, planned_steps // CURVE_POINTS) == 0]
    by_epoch = {metric_name("train", name): (epochs["epoch"], epochs[name]) for name in epochs.columns.drop("epoch")}
    by_step = {f"steps/{name}": (shown["step"], shown[name]) for name in _STEP_FIGURES if name in shown}
    return _finite(by_epoch | by_step)


def noise_curves(noise: pd.DataFrame, stage: str) -> Curves:
    """Return the gradient noise scale over the kept epochs; what is infinite is left out."""
    return _finite({metric_name(stage, "noise_scale"): (noise["epoch"], noise["noise_scale"])})


def _finite(columns: Mapping[str, tuple[pd.Series, pd.Series]]) -> Curves:
    return {
        name: {step: value for step, value in zip(numbers, values, strict=True) if math.isfinite(value)}
        for name, (numbers, values) in columns.items()
    }


_TABLE = ".parquet"  # of every example or step: nothing to be looked at in a browser
_TABLES_TAG = "mlflow.loggedArtifacts"  # where MLflow's UI looks for tables
_GALLERIES = {  # picture → the group of figures that it stands with
    "samples": "data",
    "mistakes": "eval",
    **dict.fromkeys(("largest", "suspects_train", "suspects_test", "influence"), "gradients"),
}
_MOST_ROWS = 1000  # of a table of all examples, which a browser can still sort
_RANKED = {"predictions": "loss", "scores": "grad_norm"}  # table of all examples → by what its rows are chosen


def log_results(client: MlflowClient, run_id: str, folder: Path, *, tables: bool) -> None:
    """Log what a stage wrote to its folder of results, in the place of what an earlier attempt logged.

    Args:
        client: of the store.
        run_id: of the row.
        folder: the stage's results.
        tables: whether parquet tables are logged too.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (tables or path.suffix != _TABLE):
            under = Path("results") / path.parent.relative_to(folder)
            client.log_artifact(run_id, str(path), under.as_posix())
    _log_galleries(client, run_id, folder)
    _log_tables(client, run_id, folder)


def _log_galleries(client: MlflowClient, run_id: str, folder: Path) -> None:
    """Log galleries as images, which the UI's charts show side by side; once, as one does not replace another."""
    paths = {f"{group}/{name}": folder / f"{name}.png" for name, group in _GALLERIES.items()}
    found = {key: path for key, path in paths.items() if path.is_file()}
    if found and not client.list_artifacts(run_id, "images"):
        for key, path in found.items():
            with Image.open(path) as picture:
                client.log_image(run_id, picture.convert("RGB"), key=key, step=0)


def _log_tables(client: MlflowClient, run_id: str, folder: Path) -> None:
    """Log tables where the UI shows them; not by `log_table`, which appends to what an earlier attempt logged."""
    shown = {path.stem: pd.read_csv(path) for path in sorted(folder.glob("*.csv"))}
    for name, column in _RANKED.items():
        if (folder / f"{name}{_TABLE}").is_file():
            table = pd.read_parquet(folder / f"{name}{_TABLE}")
            shown[f"{name}_by_{column}"] = table.nlargest(_MOST_ROWS, column, keep="first").round(6)
    for name, table in shown.items():
        client.log_dict(run_id, json.loads(table.to_json(orient="split", index=False)), f"tables/{name}.json")
    if shown:
        said = json.dumps([{"path": f"tables/{name}.json", "type": "table"} for name in shown])
        client.log_batch(run_id, tags=[RunTag(_TABLES_TAG, said)])
