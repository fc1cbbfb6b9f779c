"""A training's history as tables: an epoch a row for people and plots, a step a row for analyses, curves for MLflow."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pandas as pd

from gradtrail.core.history import EpochRecord, History
from gradtrail.core.models import HostParams, ModelConfig, num_parameters
from gradtrail.core.train_step import StepRecord
from gradtrail.io.curves import Curves, curves
from gradtrail.io.datasets import DatasetInfo
from gradtrail.io.weights import WeightsInfo, write_weights


def epoch_table(epochs: Sequence[EpochRecord]) -> pd.DataFrame:
    """Return a row for each epoch."""
    columns = [field.name for field in dataclasses.fields(EpochRecord)]
    return pd.DataFrame([dataclasses.asdict(record) for record in epochs], columns=columns)


def step_table(steps: Sequence[StepRecord], *, before: int = 0) -> pd.DataFrame:
    """Return a row for each step, counted from 1 after the steps `before`; loss scales where there are any."""
    columns = [field.name for field in dataclasses.fields(StepRecord) if getattr(steps[0], field.name) is not None]
    table = pd.DataFrame({name: np.concatenate([getattr(part, name) for part in steps]) for name in columns})
    table.insert(0, "step", np.arange(1, len(table) + 1, dtype=np.int32) + np.int32(before))
    return table


def parameter_table(params: HostParams) -> pd.DataFrame:
    """Return a row for each array of a network's parameters, and their sum."""
    rows = [
        (jax.tree_util.keystr(key, simple=True, separator="/"), " × ".join(map(str, leaf.shape)), leaf.size)
        for key, leaf in jax.tree.leaves_with_path(params)
    ]
    return pd.DataFrame([*rows, ("all", "", num_parameters(params))], columns=["parameter", "shape", "number"])


def write_tables(folder: Path, history: History) -> None:
    """Write `epochs.csv`, `parameters.csv` and `steps.parquet`."""
    folder.mkdir(parents=True, exist_ok=True)
    epoch_table(history.epochs).to_csv(folder / "epochs.csv", index=False, float_format="%.9g")
    parameter_table(history.final.params).to_csv(folder / "parameters.csv", index=False)
    step_table(history.steps).to_parquet(folder / "steps.parquet", index=False)


def write_all_weights(
    folder: Path, history: History, config: ModelConfig, label_smoothing: float, dataset: DatasetInfo
) -> None:
    """Write the weights that a training leaves behind: `final`, `best`, and `epochs/NNN` for those kept."""
    (folder / "epochs").mkdir(parents=True)  # an out even where no epoch is kept
    kept = {f"epochs/{weights.epoch:03d}": weights for weights in history.kept}
    for name, weights in {"final": history.final, "best": history.best, **kept}.items():
        info = WeightsInfo(model=config, label_smoothing=label_smoothing, dataset=dataset, epoch=weights.epoch)
        write_weights(folder / f"{name}.safetensors", weights.params, info)


def live_curves(history: History, planned_steps: int) -> Curves:
    """Return the part of a training's curves that its last epoch adds."""
    steps_before = sum(len(part.loss) for part in history.steps[:-1])
    return curves(epoch_table(history.epochs[-1:]), step_table(history.steps[-1:], before=steps_before), planned_steps)


def measure(history: History, planned_steps: int) -> dict[str, float]:
    """Return the metrics of a training: its size, the last epoch's figures, and which epoch was best.

    `planned_steps` are those of all epochs asked for; early stopping may have left some undone.
    """
    last = {key: value for key, value in dataclasses.asdict(history.epochs[-1]).items() if key != "epoch"}
    return {
        **last,
        "num_parameters": num_parameters(history.final.params),
        "epochs": len(history.epochs),
        "steps": sum(len(part.loss) for part in history.steps),
        "planned_steps": planned_steps,
        "best_epoch": history.best.epoch,
        "best_validation_accuracy": history.best_record.validation_accuracy,
        **_measure_scaling(history.steps),
    }


def measure_time(history: History, seconds: float) -> dict[str, float]:
    """Return how long the loop of a training took, validation included and compilation not, all and by epoch."""
    return {"seconds": seconds, "seconds_per_epoch": seconds / len(history.epochs)}


def _measure_scaling(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return how often a step was skipped and the last loss scale; nothing where the loss was not scaled."""
    if steps[-1].loss_scale is None:
        return {}
    skipped = sum(int(np.sum(part.skipped)) for part in steps if part.skipped is not None)
    return {"skipped_steps": skipped, "loss_scale": float(steps[-1].loss_scale[-1])}
