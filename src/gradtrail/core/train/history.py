"""The history of a training on the host: records of its steps and epochs, and kept weights."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gradtrail.core.batching import PADDING
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.models import HostParams, Params
from gradtrail.core.train.dynamics import LearningDynamics
from gradtrail.core.train.gradient import RowRecord
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.pytrees import add_prefix, leaves_by_name, numbered, strip_prefix
from gradtrail.core.train.step import StepRecord


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Metrics of one epoch."""

    epoch: int  # number of the epoch, from 1
    loss: float  # mean training loss over the steps that were not skipped, in nats, label smoothing included
    cross_entropy: float  # the same loss without label smoothing
    accuracy: float  # mean training accuracy over the same steps, with dropout and augmentation
    validation_loss: float  # validation loss after the epoch, in nats, without label smoothing
    validation_accuracy: float  # validation accuracy after the epoch


@dataclass(frozen=True, kw_only=True)
class KeptWeights:
    """Parameters on the host, and the number of epochs they were trained for."""

    epoch: int
    params: HostParams


class History:
    """Records of a training, extended epoch by epoch.

    Args:
        keep_epochs: epochs whose weights are kept; 0 is before training.
        params: the initial weights, on the host.
        precision: precision of the training, for error messages.
        num_sampled: number of examples in the records of rows; None if each epoch visits all of them.

    Attributes:
        epochs: records of the epochs.
        steps: records of the steps of each epoch.
        dynamics: statistics of the sampled examples; None before the first epoch.
        kept: weights of the epochs in `keep_epochs`.
        final: weights after the last epoch.
        best: weights of the epoch with the highest validation accuracy, the first of equals.
    """

    def __init__(
        self,
        keep_epochs: Collection[int],
        params: HostParams,
        *,
        precision: Precision = "float32",
        num_sampled: int | None = None,
    ):
        self._precision = precision
        self._num_sampled = num_sampled
        self._keep_epochs = frozenset(keep_epochs)
        self.epochs: list[EpochRecord] = []
        self.steps: list[StepRecord] = []
        self.dynamics: LearningDynamics | None = None
        self.final = self.best = KeptWeights(epoch=0, params=params)
        self.kept = [self.final] if 0 in self._keep_epochs else []

    def add(self, chunk: Chunk, params: HostParams, validation: dict[str, float]) -> EpochRecord:
        """Add an epoch.

        Args:
            chunk: the last chunk of the epoch.
            params: the weights after it, to keep.
            validation: validation `loss` and `accuracy` of `params`.

        Raises:
            FloatingPointError: one line; a loss, gradient or weight is not finite. Under loss scaling such a step is
                skipped, and only an epoch of skipped steps alone is an error.
        """
        self.check(chunk)
        records: StepRecord = jax.device_get(chunk.records)
        done = np.isfinite(records.loss) & np.isfinite(records.grad_norm)
        if not done.any():
            raise FloatingPointError(_describe_divergence(chunk.epoch, records, done, self._precision))
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
            raise FloatingPointError(
                f"training diverged: the weights after epoch {chunk.epoch} are not finite, at learning rate "
                f"{records.learning_rate[-1]:.4g} in {self._precision}; try a lower learning rate, or train.clip_norm"
            )
        record = EpochRecord(
            epoch=chunk.epoch,
            loss=float(np.mean(records.loss[done], dtype=np.float64)),
            cross_entropy=float(np.mean(records.cross_entropy[done], dtype=np.float64)),
            accuracy=float(np.mean(records.accuracy[done], dtype=np.float64)),
            validation_loss=validation["loss"],
            validation_accuracy=validation["accuracy"],
        )
        self.final = KeptWeights(epoch=chunk.epoch, params=params)
        if not self.epochs or record.validation_accuracy > self.best_record.validation_accuracy:
            self.best = self.final
        if chunk.epoch in self._keep_epochs:
            self.kept.append(self.final)
        self.epochs.append(record)
        self.steps.append(dataclasses.replace(records, rows=None))
        self._add_dynamics(records.rows)
        return record

    def check(self, chunk: Chunk) -> None:
        """Raise FloatingPointError if a loss or gradient of the epoch so far is not finite; not under loss scaling."""
        if chunk.records.skipped is not None:
            return
        done = np.isfinite(np.asarray(chunk.records.loss)) & np.isfinite(np.asarray(chunk.records.grad_norm))
        if not done.all():  # entries of later steps are 0
            records = jax.device_get(chunk.records)
            raise FloatingPointError(_describe_divergence(chunk.epoch, records, done, self._precision))

    def _add_dynamics(self, rows: RowRecord | None) -> None:
        if rows is None:
            return
        if self.dynamics is None:
            visited = int(np.count_nonzero(rows.indices != PADDING))
            self.dynamics = LearningDynamics(visited if self._num_sampled is None else self._num_sampled)
        self.dynamics.add(rows)

    def as_arrays(self) -> dict[str, np.ndarray]:
        """Return the history as named arrays, for `restore`."""
        arrays = {"epochs": np.array([dataclasses.astuple(record) for record in self.epochs], np.float64)}
        for field in dataclasses.fields(StepRecord):
            columns = [getattr(part, field.name) for part in self.steps]
            if columns and columns[0] is not None:
                arrays[f"steps.{field.name}"] = np.stack(columns)
        if self.dynamics is not None:
            arrays |= add_prefix("dynamics", self.dynamics.as_arrays())
        for name, weights in {
            "final": self.final,
            "best": self.best,
            **add_prefix("kept", numbered(self.kept)),
        }.items():
            params = add_prefix("params", leaves_by_name(weights.params))
            arrays |= add_prefix(name, {"epoch": np.array(weights.epoch), **params})
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray]) -> "History":
        """Fill a new history of the same training from the result of `as_arrays`, and return it.

        Raises:
            LookupError, ValueError: the arrays are not those of a history of this model.
        """
        names = [field.name for field in dataclasses.fields(EpochRecord)]
        rows = arrays["epochs"].reshape(-1, len(names)).tolist() if "epochs" in arrays else []
        self.epochs = [EpochRecord(**dict(zip(names, row, strict=True)) | {"epoch": int(row[0])}) for row in rows]
        fields = [field.name for field in dataclasses.fields(StepRecord)]
        columns = {name: arrays.get(f"steps.{name}") for name in fields}
        if any(column.ndim != 2 or len(column) != len(rows) for column in columns.values() if column is not None):
            raise ValueError(f"steps are not of {len(rows)} epochs")
        for number in range(len(rows)):
            values: dict[str, Any] = {
                name: column if column is None else column[number] for name, column in columns.items()
            }
            self.steps.append(StepRecord(**values))
        dynamics = strip_prefix("dynamics", arrays)
        self.dynamics = LearningDynamics.from_arrays(dynamics) if dynamics else None
        initial = self.final.params

        def weights(name: str) -> KeptWeights:
            values = strip_prefix(name, arrays)
            leaves = strip_prefix("params", values)
            params = jax.tree.unflatten(jax.tree.structure(initial), [leaves[number] for number in sorted(leaves)])
            if jax.tree.map(np.shape, params) != jax.tree.map(np.shape, initial):
                raise ValueError(f"weights {name} are of another model")
            return KeptWeights(epoch=int(values["epoch"]), params=params)

        self.final, self.best = weights("final"), weights("best")
        numbers = sorted({name.partition(".")[0] for name in strip_prefix("kept", arrays)})
        self.kept = [weights(f"kept.{number}") for number in numbers]
        return self

    def has_stalled(self, patience: int | None) -> bool:
        """Return whether the best epoch was `patience` epochs ago; False if `patience` is None."""
        return patience is not None and self.final.epoch - self.best.epoch >= patience

    def describe(self) -> str:
        """Describe the progress of the training in one line."""
        if not self.epochs:
            return "first epoch"
        last = self.epochs[-1]
        return f"epoch {last.epoch} · loss {last.loss:.4f} · validation {last.validation_accuracy:.2%}"

    @property
    def best_record(self) -> EpochRecord:
        """The record of the epoch with the best weights."""
        return self.epochs[self.best.epoch - 1]


def on_host(params: Params) -> HostParams:
    """Copy parameters to the host; on a CPU `jax.device_get` may share the memory that the next step overwrites."""
    return jax.tree.map(np.array, params)


def _describe_divergence(epoch: int, records: StepRecord, done: np.ndarray, precision: Precision) -> str:
    """Describe in one line the first step that is not finite."""
    step = int(np.argmin(done))
    last = f"the last finite loss was {records.loss[step - 1]:.4g}" if step else "and so are all after it"
    quantity = "loss" if not np.isfinite(records.loss[step]) else "gradient"
    return (
        f"training diverged: the {quantity} of step {step + 1} in epoch {epoch} is not finite, {last}, at learning "
        f"rate {records.learning_rate[step]:.4g} in {precision}; try a lower learning rate, or train.clip_norm"
    )
