"""What a training left behind for analyses of its course: the kept weights, the rates, and how each example fared."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.examples import Split
from gradtrail.core.gradient_analysis import Trajectory
from gradtrail.core.models import Model, Params, WeightsKind
from gradtrail.io.datasets import DatasetInfo
from gradtrail.io.errors import UserError, one_line
from gradtrail.io.weights import WeightsInfo, read_weights, require_same_data

DYNAMICS = ["example_id", "forgetting_events", "first_correct_epoch", "mean_probability", "probability_std"]


def read_trajectory(
    models: Path, results: Path, scored: WeightsKind, dataset: DatasetInfo
) -> tuple[Model, WeightsInfo, Trajectory]:
    """Read the weights to score and those of the kept epochs, and the learning rates.

    Raises:
        UserError: a file is missing or damaged, or the weights are not of one model, trained on `dataset`.
    """
    path = models / f"{scored}.safetensors"
    model, params, about = read_weights(path)
    require_same_data(path, about, dataset)
    by_epoch: dict[int, Params] = {}
    for path in sorted((models / "epochs").glob("*.safetensors")):
        other, kept, kept_about = read_weights(path)
        if other.config != model.config:
            raise UserError(
                f"{path}: weights of {other.config.name}, beside {model.config.name} in {scored}.safetensors"
            )
        require_same_data(path, kept_about, dataset)
        by_epoch[kept_about.epoch] = kept
    steps = _read_parquet(results / "steps.parquet", ["num_examples", "learning_rate"])
    epochs = len(_read(results / "epochs.csv", pd.read_csv))
    trajectory = Trajectory(
        params=by_epoch | {about.epoch: params},
        scored=about.epoch,
        learning_rates=steps["learning_rate"].to_numpy(),
        steps_per_epoch=len(steps) // epochs,
        batch_size=int(steps["num_examples"].max()),
    )
    return model, about, trajectory


def read_dynamics(results: Path, train: Split) -> Mapping[str, np.ndarray]:
    """Read how each training example fared, in the order of the split.

    Raises:
        UserError: the file is missing or damaged, or is about other examples.
    """
    path = results / "dynamics.parquet"
    table = _read_parquet(path, DYNAMICS)
    if not np.array_equal(table["example_id"], train.example_id):
        raise UserError(f"{path}: holds other examples than the training split; `dvc repro` makes both")
    return {name: table[name].to_numpy() for name in DYNAMICS[1:]}


def _read(path: Path, read: Callable[[Path], pd.DataFrame]) -> pd.DataFrame:
    try:
        return read(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `dvc repro` makes it") from None
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: no table of this project: {one_line(error)}") from None


def _read_parquet(path: Path, columns: list[str]) -> pd.DataFrame:
    return _read(path, functools.partial(pd.read_parquet, columns=columns))
