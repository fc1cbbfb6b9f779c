"""The outputs of a training: weights, tables and figures of each network, and their means."""

import dataclasses
import functools
import shutil
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from gradtrail.core.nn.models import num_parameters
from gradtrail.stages.data.changes import write_changes
from gradtrail.stages.dp.accounting import guarantee_of
from gradtrail.stages.dp.guarantee import PrivacyGuarantee, write_guarantee
from gradtrail.stages.dp.redaction import redacted_history
from gradtrail.stages.model.members import FOLDER, member_folder, over_members, spread, write_seeds
from gradtrail.stages.train import figures, tables
from gradtrail.stages.train.training import Training, TrainResult
from gradtrail.support.errors import UserError

_STATE_COPIES = 10  # copies of the parameters in a checkpoint: optimizer, average and kept weights
_EXAMPLE_BYTES = 32  # size of a sampled example in the tables
_MODELS, _RESULTS = Path("models"), Path("results/train")


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A network whose weights and tables are in `folder`."""

    folder: Path
    epochs: pd.DataFrame
    metrics: dict[str, float]
    seconds: float  # time of its loop


class Outputs:
    """Writes each network as soon as it is trained, so that memory holds the first and one more.

    Args:
        training: The training, compiled.
        scratch: A folder on the disk of the outputs.

    Raises:
        UserError: The disk has no room for so many networks; one line with the number that fits.
    """

    def __init__(self, training: Training, scratch: Path):
        self._training, self._scratch = training, scratch
        self._written: dict[int, _Written] = {}  # by seed
        self._first: TrainResult | None = None
        self._require_space()

    @property
    def first(self) -> TrainResult:
        """The first network, with what may be published of its history."""
        if self._first is None:
            raise ValueError("no network was added")
        return self._first

    def add(self, seed: int, trained: TrainResult) -> None:
        """Write weights and tables of a network to a folder of its own."""
        training, config, folder = self._training, self._training.config, self._scratch / str(seed)
        history = redacted_history(trained.history, config.privacy)
        self._first = self._first or dataclasses.replace(trained, history=history)
        model = training.model.config
        tables.write_all_weights(folder / _MODELS, history, model, config.loss, training.info)
        tables.write_tables(
            folder / _RESULTS, history, training.sampled_id, training.epsilons, removed=training.removed_id
        )
        self._written[seed] = _Written(
            folder=folder,
            epochs=tables.epoch_table(history.epochs, training.epsilons),
            metrics=tables.measure(history, config, training.compiled.num_steps),
            seconds=trained.seconds,
        )

    @property
    def metrics(self) -> dict[str, float | str]:
        """The metrics of the stage: means over the networks, with their intervals."""
        measured = over_members([network.metrics for network in self._written.values()])
        spent = self._guarantee.metrics if self._guarantee else {}
        return {**self._training.info.as_metrics(), **measured, **spent, **self._training.num_changed}

    @property
    def seconds(self) -> float:
        """Time of the loops of all networks, with validation and without compilation."""
        return sum(network.seconds for network in self._written.values())

    def write(self, new: Path) -> None:
        """Put the outputs together in the folder of the new outs; the files of the networks are moved away."""
        training, networks = self._training, self._written
        first = next(iter(networks.values()))
        for out in (_MODELS, _RESULTS):
            shutil.copytree(first.folder / out, new / out, dirs_exist_ok=True)
            for seed, network in networks.items() if len(networks) > 1 else ():
                (new / out / FOLDER).mkdir(exist_ok=True)
                shutil.move(network.folder / out, member_folder(new / out, seed))
        if len(networks) > 1:
            rows = [{"seed": seed, **network.metrics} for seed, network in networks.items()]
            pd.DataFrame(rows).to_csv(new / _RESULTS / "members.csv", index=False, float_format="%.9g")
        write_seeds(new / _MODELS, [*networks])

        epochs = mean_epochs([network.epochs for network in networks.values()])
        tables.write_epochs(new / _RESULTS, epochs)
        steps = pd.read_parquet(new / _RESULTS / "steps.parquet")
        title = f"{training.model.config.name} on {training.info.label}"
        figures.draw(new / _RESULTS, epochs, steps, title, training.config.clip_norm)

        if self._guarantee:
            write_guarantee(new / _RESULTS, self._guarantee)
        if training.start:
            training.start.write(new / _RESULTS)
        if training.changed_labels is not None:
            write_changes(new / _RESULTS, training.train, training.changed_labels)

    @functools.cached_property
    def _guarantee(self) -> PrivacyGuarantee | None:
        """The guarantee of all networks; None for a training that is not private."""
        training, lengths = self._training, [len(network.epochs) for network in self._written.values()]
        spending = training.spending
        return guarantee_of(training.config, spending, len(training.train), lengths) if spending else None

    def _require_space(self) -> None:
        """Refuse more networks than the disk has room for, before the first is trained."""
        config, training = self._training.config, self._training
        num_weights = 2 + sum(epoch <= config.epochs for epoch in config.keep_epochs)
        weight_bytes = 4 * num_parameters(training.model.abstract_params())
        network_bytes = (_STATE_COPIES + num_weights) * weight_bytes + _EXAMPLE_BYTES * len(training.sampled)
        free = shutil.disk_usage(self._scratch).free
        if config.members > 1 and config.members * network_bytes > free:
            raise UserError(
                f"train.members: {config.members:,} members take about {config.members * network_bytes / 1e9:,.1f} GB, "
                f"and {max(0, free) / 1e9:,.1f} GB of disk space are free; at most {max(0, free // network_bytes):,} "
                f"fit"
            )


def mean_epochs(tables_of_epochs: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the table of epochs of a training; of a single network, its own.

    Of several, the mean of each column over the networks that reached that epoch, and the ends of its 95 % interval,
    `_low` and `_high`, if at least two did.
    """
    if len(tables_of_epochs) == 1:
        return tables_of_epochs[0]
    rows = []
    for epoch, rows_of_epoch in pd.concat(tables_of_epochs).groupby("epoch"):
        row: dict[str, float] = {"epoch": int(str(epoch))}
        for column in rows_of_epoch.columns.drop("epoch"):
            row[column] = float(rows_of_epoch[column].mean())
            if len(rows_of_epoch) > 1 and column != "epsilon":  # equal for all networks
                interval = spread(column, rows_of_epoch[column].tolist())
                row |= {f"{column}_low": interval.low, f"{column}_high": interval.high}
        rows.append(row)
    return pd.DataFrame(rows)
