"""The curves that MLflow shows of a training, from the tables of its history."""

from pathlib import Path

import pandas as pd

from gradtrail.io.metric_names import metric_name

CURVE_POINTS = 200
Curves = dict[str, dict[int, float]]


def read_tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the tables of epochs and of steps."""
    return pd.read_csv(folder / "epochs.csv"), pd.read_parquet(folder / "steps.parquet")


def curves(epochs: pd.DataFrame, steps: pd.DataFrame, num_steps: int) -> Curves:
    """Return name → step → value: figures of epochs over epochs, and of some 200 of the steps over steps.

    Args:
        epochs: those done so far.
        steps: those done so far.
        num_steps: of the whole training, which decides which steps are shown.
    """
    shown = steps[steps["step"] % max(1, num_steps // CURVE_POINTS) == 0]
    by_epoch = {metric_name("train", name): epochs[name] for name in epochs.columns.drop("epoch")}
    by_step = {f"steps/{name}": shown[name] for name in ("loss", "grad_norm", "learning_rate")}
    return {name: dict(zip(epochs["epoch"], column, strict=True)) for name, column in by_epoch.items()} | {
        name: dict(zip(shown["step"], column, strict=True)) for name, column in by_step.items()
    }
