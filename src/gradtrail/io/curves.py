"""The curves that MLflow shows of a training, from the tables of its history."""

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from gradtrail.io.metric_names import metric_name

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
