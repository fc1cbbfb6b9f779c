"""The outputs of a training: those of each member, and their mean."""

import dataclasses
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Int

from gradtrail.core.nn.models import ModelConfig
from gradtrail.core.train.config import TrainConfig
from gradtrail.stages.artifacts.data_files import DatasetInfo
from gradtrail.stages.artifacts.members import FOLDER, member_folder, spread, write_seeds
from gradtrail.stages.train import tables
from gradtrail.stages.train.loop import TrainResult
from gradtrail.stages.train.release import redacted_history
from gradtrail.support.errors import UserError

_STATE_COPIES = 10  # copies of the parameters in a checkpoint: optimizer, average and kept weights
_EXAMPLE_BYTES = 32  # size of a sampled example in the tables
_MODELS, _RESULTS = Path("models"), Path("results/train")


@dataclass(frozen=True, kw_only=True)
class WrittenMember:
    """A member whose weights and tables are on disk."""

    folder: Path  # folder with `models` and `results/train`
    epochs: pd.DataFrame  # table of epochs
    metrics: dict[str, float]  # metrics of the training
    seconds: float  # time of its loop


def _write_member(
    folder: Path,
    done: TrainResult,
    model: ModelConfig,
    config: TrainConfig,
    dataset: DatasetInfo,
    example_id: Int[np.ndarray, " examples"],
) -> WrittenMember:
    """Write weights and tables of a member to a new folder."""
    tables.write_all_weights(folder / _MODELS, done.history, model, config.label_smoothing, dataset)
    tables.write_tables(folder / _RESULTS, done.history, example_id, done.epsilons)
    metrics = tables.measure(done.history, config, done.planned_steps)
    epochs = tables.epoch_table(done.history.epochs, done.epsilons)
    return WrittenMember(folder=folder, epochs=epochs, metrics=metrics, seconds=done.seconds)


def require_space(scratch: Path, config: TrainConfig, num_parameters: int, num_sampled: int) -> None:
    """Refuse more members than the disk has room for, before the first is trained.

    Memory does not limit their number: one member is trained at a time, and written before the next.

    Args:
        scratch: a folder on the disk of the outputs.
        config: params of the training.
        num_parameters: size of a network, float32.
        num_sampled: number of examples in the tables of learning dynamics.

    Raises:
        UserError: too many members; one line with the number that fits.
    """
    num_weights = 2 + sum(epoch <= config.epochs for epoch in config.keep_epochs)
    member_bytes = (_STATE_COPIES + num_weights) * 4 * num_parameters + _EXAMPLE_BYTES * num_sampled
    free = shutil.disk_usage(scratch).free
    if config.members > 1 and config.members * member_bytes > free:
        raise UserError(
            f"train.members: {config.members:,} members take about {config.members * member_bytes / 1e9:,.1f} GB, and "
            f"{max(0, free) / 1e9:,.1f} GB of disk space are free; at most {max(0, free // member_bytes):,} fit"
        )


def write_each(
    scratch: Path,
    results: Iterable[tuple[int, TrainResult]],
    model: ModelConfig,
    config: TrainConfig,
    dataset: DatasetInfo,
    example_id: Int[np.ndarray, " examples"],
) -> tuple[TrainResult, dict[int, WrittenMember]]:
    """Write every member as soon as it is trained, so that memory holds the first and one more.

    Returns:
        The result of the first member, and the written members by seed.
    """
    first: TrainResult | None = None
    written = {}
    for seed, trained in results:
        done = dataclasses.replace(trained, history=redacted_history(trained.history, config.privacy))
        first = first or done
        written[seed] = _write_member(scratch / str(seed), done, model, config, dataset, example_id)
        del trained, done
    if first is None:
        raise ValueError("a training has at least one member")
    return first, written


def write_members(new: Path, written: Mapping[int, WrittenMember]) -> None:
    """Put the outputs of a training together; the files of its members, by seed, are moved away."""
    first = next(iter(written.values()))
    for out in (_MODELS, _RESULTS):
        shutil.copytree(first.folder / out, new / out, dirs_exist_ok=True)
        for seed, member in written.items() if len(written) > 1 else ():
            (new / out / FOLDER).mkdir(exist_ok=True)
            shutil.move(member.folder / out, member_folder(new / out, seed))
    tables.write_epochs(new / _RESULTS, mean_epochs(written))
    if len(written) > 1:
        rows = [{"seed": seed, **member.metrics} for seed, member in written.items()]
        pd.DataFrame(rows).to_csv(new / _RESULTS / "members.csv", index=False, float_format="%.9g")
    write_seeds(new / _MODELS, [*written])


def measure_time(written: Mapping[int, WrittenMember]) -> dict[str, float]:
    """Return the time of the loops of all members, with validation and without compilation."""
    return {"seconds": sum(member.seconds for member in written.values())}


def mean_epochs(members: Mapping[int, WrittenMember]) -> pd.DataFrame:
    """Return the table of epochs of a training; for a single member, its own.

    For several members, the mean of each column over the members that reached that epoch, and the ends of its 95 %
    interval, `_low` and `_high`, if at least two did.
    """
    if len(members) == 1:
        return next(iter(members.values())).epochs
    rows = []
    for epoch, rows_of_epoch in pd.concat(member.epochs for member in members.values()).groupby("epoch"):
        row: dict[str, float] = {"epoch": int(str(epoch))}
        for column in rows_of_epoch.columns.drop("epoch"):
            row[column] = float(rows_of_epoch[column].mean())
            if len(rows_of_epoch) > 1 and column != "epsilon":  # equal for all members
                interval = spread(column, rows_of_epoch[column].tolist())
                row |= {f"{column}_low": interval.low, f"{column}_high": interval.high}
        rows.append(row)
    return pd.DataFrame(rows)
