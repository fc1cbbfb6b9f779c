"""What a training leaves behind: the record of its steps and epochs, and the weights worth keeping, on the host."""

from collections.abc import Collection
from dataclasses import dataclass

import jax
import numpy as np

from gradtrail.core.models import HostParams, Params
from gradtrail.core.training import Chunk, StepRecord


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Figures of one epoch.

    Attributes:
        epoch: from 1.
        loss: mean over the epoch's steps, in nats, label smoothing included.
        accuracy: likewise, while the weights were changing.
        validation_loss: after the epoch, without label smoothing.
        validation_accuracy: after the epoch.
    """

    epoch: int
    loss: float
    accuracy: float
    validation_loss: float
    validation_accuracy: float


@dataclass(frozen=True, kw_only=True)
class KeptWeights:
    """Parameters on the host, and the number of epochs behind them."""

    epoch: int
    params: HostParams


class History:
    """Collects a training as it goes on.

    Args:
        keep_epochs: epochs whose weights are kept; 0 is before training.
        params: the initial weights.

    Attributes:
        epochs: one record for each epoch done.
        steps: the records of each epoch's steps.
        kept: the weights of the epochs asked for.
        final: the weights of the last epoch done.
        best: the weights of the epoch with the highest validation accuracy, the first of equals.
    """

    def __init__(self, keep_epochs: Collection[int], params: Params):
        self._keep_epochs = frozenset(keep_epochs)
        self.epochs: list[EpochRecord] = []
        self.steps: list[StepRecord] = []
        self.final = self.best = KeptWeights(epoch=0, params=_copy(params))
        self.kept = [self.final] if 0 in self._keep_epochs else []

    def add(self, chunk: Chunk, validation: dict[str, float]) -> EpochRecord:
        """Add an epoch, from its last chunk and the validation after it; copies what the next chunk overwrites.

        Raises:
            FloatingPointError: a loss is not finite; the message is one line.
        """
        records = jax.device_get(chunk.records)
        if not np.all(np.isfinite(records.loss)):
            raise FloatingPointError(_describe_divergence(chunk.epoch, records))
        record = EpochRecord(
            epoch=chunk.epoch,
            loss=float(np.mean(records.loss, dtype=np.float64)),
            accuracy=float(np.mean(records.accuracy, dtype=np.float64)),
            validation_loss=validation["loss"],
            validation_accuracy=validation["accuracy"],
        )
        self.final = KeptWeights(epoch=chunk.epoch, params=_copy(chunk.state.params))
        if not self.epochs or record.validation_accuracy > self.best_record.validation_accuracy:
            self.best = self.final
        if chunk.epoch in self._keep_epochs:
            self.kept.append(self.final)
        self.epochs.append(record)
        self.steps.append(records)
        return record

    def describe(self) -> str:
        """Say in a few words where the training stands."""
        if not self.epochs:
            return "first epoch"
        last = self.epochs[-1]
        return f"epoch {last.epoch} · loss {last.loss:.4f} · validation {last.validation_accuracy:.2%}"

    @property
    def best_record(self) -> EpochRecord:
        """The record of the epoch with the best weights."""
        return self.epochs[self.best.epoch - 1]


def _describe_divergence(epoch: int, records: StepRecord) -> str:
    """Say in one line where a training came apart."""
    step = int(np.argmin(np.isfinite(records.loss)))
    last = f"the last finite one was {records.loss[step - 1]:.4g}" if step else "and so are all after it"
    return (
        f"training diverged: the loss of step {step + 1} in epoch {epoch} is not finite, {last}, at learning rate "
        f"{records.learning_rate[step]:.4g}; try a lower train.learning_rate, or train.clip_norm"
    )


def _copy(params: Params) -> HostParams:
    """Copy to the host: on a CPU `device_get` may share the memory that the next step overwrites."""
    return jax.tree.map(np.array, params)
