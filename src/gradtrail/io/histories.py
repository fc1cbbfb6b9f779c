"""A training's history as tables: an epoch a row for people and plots, a step a row for analyses, curves for MLflow."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.history import EpochRecord, History
from gradtrail.core.models import ModelConfig, num_parameters
from gradtrail.core.training import StepRecord
from gradtrail.io.curves import Curves, curves
from gradtrail.io.datasets import DatasetInfo
from gradtrail.io.weights import WeightsInfo, write_weights


def epoch_table(history: History) -> pd.DataFrame:
    """Return a row for each epoch."""
    columns = [field.name for field in dataclasses.fields(EpochRecord)]
    return pd.DataFrame([dataclasses.asdict(record) for record in history.epochs], columns=columns)


def step_table(history: History) -> pd.DataFrame:
    """Return a row for each optimizer step, counted from 1."""
    columns = [field.name for field in dataclasses.fields(StepRecord)]
    table = pd.DataFrame({name: np.concatenate([getattr(part, name) for part in history.steps]) for name in columns})
    table.insert(0, "step", np.arange(1, len(table) + 1, dtype=np.int32))
    return table


def write_tables(folder: Path, history: History) -> None:
    """Write `epochs.csv` and `steps.parquet`."""
    folder.mkdir(parents=True, exist_ok=True)
    epoch_table(history).to_csv(folder / "epochs.csv", index=False, float_format="%.9g")
    step_table(history).to_parquet(folder / "steps.parquet", index=False)


def write_all_weights(
    folder: Path, history: History, config: ModelConfig, label_smoothing: float, dataset: DatasetInfo
) -> None:
    """Write the weights that a training leaves behind: `final`, `best`, and `epochs/NNN` for those kept."""
    (folder / "epochs").mkdir(parents=True)  # an out even where no epoch is kept
    kept = {f"epochs/{weights.epoch:03d}": weights for weights in history.kept}
    for name, weights in {"final": history.final, "best": history.best, **kept}.items():
        info = WeightsInfo(model=config, label_smoothing=label_smoothing, dataset=dataset, epoch=weights.epoch)
        write_weights(folder / f"{name}.safetensors", weights.params, info)


def live_curves(history: History, num_steps: int) -> Curves:
    """Return the curves of a training that is going on."""
    return curves(epoch_table(history), step_table(history), num_steps)


def measure(history: History) -> dict[str, float]:
    """Return the metrics of a training: its size, the last epoch's figures, and which epoch was best."""
    last = {key: value for key, value in dataclasses.asdict(history.epochs[-1]).items() if key != "epoch"}
    return {
        **last,
        "num_parameters": num_parameters(history.final.params),
        "epochs": len(history.epochs),
        "steps": sum(len(part.loss) for part in history.steps),
        "best_epoch": history.best.epoch,
        "best_validation_accuracy": history.best_record.validation_accuracy,
    }
