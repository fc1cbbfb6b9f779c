"""The inputs of the gradient analysis from a training: kept weights, learning rates, and learning dynamics."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.data import Split
from gradtrail.core.gradients.analysis import Trajectory
from gradtrail.core.nn.models import Model, Params, WeightsKind
from gradtrail.stages.artifacts.members import read_folders
from gradtrail.stages.artifacts.parquet import read_parquet
from gradtrail.stages.artifacts.privacy import PrivacyGuarantee, read_guarantee
from gradtrail.stages.artifacts.splits import sample_rows
from gradtrail.stages.artifacts.weights import WeightsInfo, read_weights, require_same_data
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.support.errors import UserError, one_line

DYNAMICS = ("example_id", "forgetting_events", "first_correct_epoch", "mean_probability", "probability_std")


@dataclass(frozen=True, kw_only=True)
class MemberInputs:
    """The inputs of the analysis from the training of one member."""

    seed: int
    name: str  # name in messages; empty for a single member
    model: Model
    about: WeightsInfo  # metadata of the weights to score
    trajectory: Trajectory
    dynamics: Mapping[str, np.ndarray]  # learning dynamics, see `read_dynamics`


def scored_splits(splits: Mapping[str, Split], guarantee: PrivacyGuarantee | None) -> dict[str, Split]:
    """Return the splits to score; the training split of a training to publish has no examples.

    So nothing in the outputs can come from a training example.
    """
    if guarantee is None or not guarantee.release:
        return dict(splits)
    train = splits["train"]
    none = {field.name: getattr(train, field.name)[:0] for field in dataclasses.fields(train)}
    return {**splits, "train": dataclasses.replace(train, **none)}


def read_members(
    models: Path, results: Path, scored: WeightsKind, dataset: DatasetInfo, train: Split
) -> Iterator[MemberInputs]:
    """Yield the inputs of each member, read on demand.

    Raises:
        UserError: the errors of `read_trajectory` and `read_dynamics`, or the members differ in their model.
    """
    of_results, first, guarantee = read_folders(results, models), None, read_guarantee(results)
    batch_size = guarantee.batch_size if guarantee else None
    for seed, folder in read_folders(models, models).items():
        model, about, trajectory = read_trajectory(folder, of_results[seed], scored, dataset, batch_size=batch_size)
        if first and model.config != first.config:
            raise UserError(f"{folder}: weights of {model.config.name}, but the first member is {first.config.name}")
        first = first or model
        yield MemberInputs(
            seed=seed,
            name=f"seed {seed}" if len(of_results) > 1 else "",
            model=model,
            about=about,
            trajectory=trajectory,
            dynamics=read_dynamics(of_results[seed], train),
        )


def read_trajectory(
    models: Path, results: Path, scored: WeightsKind, dataset: DatasetInfo, *, batch_size: int | None = None
) -> tuple[Model, WeightsInfo, Trajectory]:
    """Read the weights to score and those of the kept epochs, and the learning rates, of one member.

    `batch_size` is the mean batch size of a private training; None for the batch size of the steps.

    Raises:
        UserError: a file is missing or damaged, or the weights are not those of one model trained on `dataset`.
    """
    path = models / f"{scored}.safetensors"
    model, params, about = read_weights(path)
    require_same_data(path, about, dataset)
    by_epoch: dict[int, Params] = {}
    for path in sorted((models / "epochs").glob("*.safetensors")):
        other, kept_params, kept_about = read_weights(path)
        if other.config != model.config:
            raise UserError(
                f"{path}: weights of {other.config.name}, but {scored}.safetensors holds {model.config.name}"
            )
        require_same_data(path, kept_about, dataset)
        by_epoch[kept_about.epoch] = kept_params
    by_epoch |= {about.epoch: params}
    epochs, learning_rates, batch_size = read_schedule(results, batch_size)
    trajectory = Trajectory(
        params=by_epoch,
        scored=about.epoch,
        learning_rates=learning_rates,
        steps_per_epoch=len(learning_rates) // epochs,
        batch_size=batch_size,
    )
    return model, about, trajectory


def read_dynamics(results: Path, train: Split) -> Mapping[str, np.ndarray]:
    """Read the learning dynamics of each training example, in the order of the split, or of a sample of a large split.

    Raises:
        UserError: the file is missing or damaged, or has other examples than the split.
    """
    path = results / "dynamics.parquet"
    table = read_parquet(path, DYNAMICS)
    rows = sample_rows(len(table))
    columns = {name: table[name].to_numpy()[rows] for name in DYNAMICS}
    if not np.array_equal(columns.pop("example_id"), train.example_id):
        raise UserError(f"{path}: has other examples than the training split; run `dvc repro`")
    return columns


def read_schedule(results: Path, batch_size: int | None = None) -> tuple[int, np.ndarray, int]:
    """Read the number of epochs of a training, the learning rate of every step, and the batch size if it is None.

    Raises:
        UserError: a file is missing or damaged, or the epochs have different numbers of steps.
    """
    epochs, path = _count_epochs(results / "epochs.csv"), results / "steps.parquet"
    steps = read_parquet(path, ("num_examples", "learning_rate"))
    if not epochs or not len(steps) or len(steps) % epochs:
        raise UserError(f"{path}: {len(steps)} steps cannot be divided evenly among {epochs} epochs")
    rates = steps["learning_rate"].to_numpy()
    return epochs, rates, int(steps["num_examples"].max()) if batch_size is None else batch_size


def _count_epochs(path: Path) -> int:
    try:
        return len(pd.read_csv(path, usecols=["epoch"]))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `dvc repro` makes it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a table of this project: {one_line(error)[:200]}") from None
