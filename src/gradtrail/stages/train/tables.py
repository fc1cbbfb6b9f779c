"""A training's history as tables: one row per epoch for people and plots, one per step for analyses."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from jaxtyping import Int

from gradtrail.core import noise_scale
from gradtrail.core.nn.losses import Loss
from gradtrail.core.nn.models import HostParams, ModelConfig, num_parameters
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import EPOCH_METRICS, EpochMetrics, History, LearningDynamics, StepMetrics
from gradtrail.stages.data.data_files import DatasetInfo
from gradtrail.stages.dp.redaction import PUBLIC_OF_EPOCHS, is_redacted
from gradtrail.stages.model.weights import WeightsInfo, write_weights

COMPARED = (  # metrics that people compare
    *("cross_entropy", "validation_accuracy", "validation_accuracy_sd", "validation_loss", "epochs"),
    *("num_parameters", "members", "epsilon"),
)
_DIGITS = "%.9g"
WINDOWS = 20  # number of parts of a training over which the noise scale is averaged


def epoch_table(epochs: Sequence[EpochMetrics], epsilons: Sequence[float] = ()) -> pd.DataFrame:
    """Return a row for each epoch, as in `epochs.csv`: numbers rounded to 9 digits.

    `epsilons` of a private training, after each epoch, become the column `epsilon`.
    """
    columns = [name for name in EPOCH_METRICS if not epochs or name in epochs[0]]
    table = pd.DataFrame([{key: _rounded(value) for key, value in epoch.items()} for epoch in epochs], columns=columns)
    if epsilons:
        table["epsilon"] = [_rounded(epsilons[int(epoch) - 1]) for epoch in table["epoch"]]
    return table


def step_table(steps: Sequence[StepMetrics], *, before: int = 0) -> pd.DataFrame:
    """Return a row for each step, counted from 1 after the steps `before`, with its metrics."""
    table = pd.DataFrame({name: np.concatenate([part[name] for part in steps]) for name in steps[0]})
    table.insert(0, "step", np.arange(1, len(table) + 1, dtype=np.int32) + np.int32(before))
    return table


def parameter_table(params: HostParams) -> pd.DataFrame:
    """Return a row for each array of a network's parameters, and their sum."""
    rows = [
        (jax.tree_util.keystr(key, simple=True, separator="/"), " × ".join(map(str, leaf.shape)), leaf.size)
        for key, leaf in jax.tree.leaves_with_path(params)
    ]
    return pd.DataFrame([*rows, ("all", "", num_parameters(params))], columns=["parameter", "shape", "number"])


def dynamics_table(dynamics: LearningDynamics, example_id: Int[np.ndarray, " examples"]) -> pd.DataFrame:
    """Return a row for each training example that was sampled: its learning dynamics over the epochs."""
    return pd.DataFrame(
        {
            "example_id": example_id,
            "forgetting_events": dynamics.forgetting_events,
            "first_correct_epoch": dynamics.first_correct,
            "mean_probability": dynamics.mean_probability,
            "probability_std": dynamics.probability_std,
        }
    )


def write_tables(
    folder: Path,
    history: History,
    example_id: Int[np.ndarray, " examples"],
    epsilons: Sequence[float] = (),
    *,
    removed: Int[np.ndarray, " removed"] | Sequence[int] = (),
) -> None:
    """Write `epochs.csv`, `parameters.csv`, `steps.parquet` and `dynamics.parquet` with this `example_id`.

    The dynamics are without the examples with the ids `removed`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_epochs(folder, epoch_table(history.epochs, epsilons))
    parameter_table(history.final.params).to_csv(folder / "parameters.csv", index=False)
    step_table(history.steps).to_parquet(folder / "steps.parquet", index=False)
    sampled = example_id[: len(history.dynamics.forgetting_events)]  # none of a training to publish
    dynamics = dynamics_table(history.dynamics, sampled)[~np.isin(sampled, removed)]
    dynamics.to_parquet(folder / "dynamics.parquet", index=False)


def write_epochs(folder: Path, epochs: pd.DataFrame) -> None:
    """Write a table of epochs, 9 digits of each number, as `epochs.csv`."""
    epochs.to_csv(folder / "epochs.csv", index=False, float_format=_DIGITS)


def write_all_weights(folder: Path, history: History, config: ModelConfig, loss: Loss, dataset: DatasetInfo) -> None:
    """Write the weights of a training: `final`, `best`, and `epochs/NNN` for the kept epochs."""
    (folder / "epochs").mkdir(parents=True)  # an output even if no epoch is kept
    params = {f"epochs/{weights.epoch:03d}": weights for weights in history.kept}
    for name, weights in {"final": history.final, "best": history.best, **params}.items():
        info = WeightsInfo(model=config, loss=loss, dataset=dataset, epoch=weights.epoch)
        write_weights(folder / f"{name}.safetensors", weights.params, info)


def measure(history: History, config: TrainConfig, planned_steps: int) -> dict[str, float]:
    """Return the metrics of a training: its size, those of the last epoch, the best epoch, and its noise scale.

    Values of the last epoch that may not be published are left out.
    `planned_steps` counts all epochs of the config; early stopping may skip some.
    """
    last = history.epochs[-1]
    names = (name for name in last if name in PUBLIC_OF_EPOCHS or not is_redacted(config.privacy))
    return {
        **{name: last[name] for name in names if name != "epoch"},
        "num_parameters": num_parameters(history.final.params),
        "epochs": len(history.epochs),
        "steps": sum(len(part["loss"]) for part in history.steps),
        "planned_steps": planned_steps,
        "best_epoch": history.best.epoch,
        "best_validation_accuracy": history.best_epoch["validation_accuracy"],
        **_measure_scaling(history.steps),
        **measure_noise_scale(history, config.batch_size, config.accumulation_steps * config.shards),
    }


def measure_noise_scale(history: History, batch_size: int, num_parts: int) -> dict[str, float]:
    """Return the mean over the training of the gradient noise scale, in examples.

    From the norms of the gradients of whole batches and of their `num_parts` parts; nothing if batches have no
    parts, or none is full. Steps whose batch was not full, or that were skipped, are left out.
    """
    table = step_table(history.steps)
    is_full = table["num_examples"] == batch_size
    if "part_grad_norm" not in table or not is_full.any():
        return {}
    norms = table.loc[is_full, ["part_grad_norm", "grad_norm"]].to_numpy()
    part_norm, norm = norms[np.isfinite(norms).all(axis=1)].T
    sizes = {"small_size": batch_size / num_parts, "large_size": batch_size}
    scales = noise_scale.over_training(*noise_scale.from_two_batch_sizes(part_norm, norm, **sizes), windows=WINDOWS)
    finite = scales[np.isfinite(scales)]
    return {"noise_scale": float(np.mean(finite))} if finite.size else {}


def _measure_scaling(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """Return how often a step was skipped and the last loss scale; nothing if the loss was not scaled."""
    if "loss_scale" not in steps[-1]:
        return {}
    skipped = sum(int(np.sum(part["skipped"])) for part in steps)
    return {"skipped_steps": skipped, "loss_scale": float(steps[-1]["loss_scale"][-1])}


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(_DIGITS % value)
