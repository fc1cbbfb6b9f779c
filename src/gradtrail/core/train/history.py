"""The history of a training on the host: records of steps and epochs, kept weights, and learning dynamics."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from gradtrail.core.batching import PADDING
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.models import HostParams, Params
from gradtrail.core.train.gradient import RowRecord
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.step import StepRecord

_MEASURED = ("loss", "cross_entropy", "accuracy")  # columns of steps whose means an epoch has


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Metrics of one epoch."""

    epoch: int  # number of the epoch, from 1
    # mean of the minimized loss over the steps that have examples and were not skipped, in nats
    loss: float
    cross_entropy: float  # mean cross-entropy over the same steps, in nats
    accuracy: float  # mean training accuracy over the same steps, with dropout and augmentation
    validation_loss: float  # validation loss after the epoch, in nats: the cross-entropy
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
        num_examples: number of examples in the records of rows.
        precision: precision of the training, for error messages.
    """

    def __init__(
        self, keep_epochs: Collection[int], params: HostParams, num_examples: int, precision: Precision = "float32"
    ):
        self.epochs: list[EpochRecord] = []
        self.steps: list[StepRecord] = []  # records of the steps of each epoch
        self.dynamics = LearningDynamics(num_examples)
        self._precision = precision
        self._keep_epochs = frozenset(keep_epochs)
        self._best_epoch = 0
        self._weights = {0: params}  # by epoch: those to keep, the best ones and the last ones

    def add(self, chunk: Chunk, params: HostParams, validation: Mapping[str, float]) -> EpochRecord:
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
        # A batch without examples, all removed or none drawn, has no loss
        has_examples = records.num_examples > 0
        measured: dict[str, Any] = {
            name: np.where(has_examples, getattr(records, name), np.float32(np.nan)) for name in _MEASURED
        }
        records = dataclasses.replace(records, **measured)
        means = {
            name: float(np.mean(values[done & has_examples], dtype=np.float64)) for name, values in measured.items()
        }
        record = EpochRecord(
            epoch=chunk.epoch,
            **means,
            validation_loss=validation["loss"],
            validation_accuracy=validation["accuracy"],
        )
        if not self.epochs or record.validation_accuracy > self.best_record.validation_accuracy:
            self._best_epoch = chunk.epoch
        self.epochs.append(record)
        self.steps.append(dataclasses.replace(records, rows=None))
        if records.rows is not None:
            self.dynamics.add(records.rows)
        needed = self._keep_epochs | {self._best_epoch}
        earlier = {epoch: weights for epoch, weights in self._weights.items() if epoch in needed}
        self._weights = earlier | {chunk.epoch: params}
        return record

    def check(self, chunk: Chunk) -> None:
        """Raise FloatingPointError if a loss or gradient of the epoch so far is not finite; not under loss scaling."""
        if chunk.records.skipped is not None:
            return
        done = np.isfinite(np.asarray(chunk.records.loss)) & np.isfinite(np.asarray(chunk.records.grad_norm))
        if not done.all():  # entries of later steps are 0
            records = jax.device_get(chunk.records)
            raise FloatingPointError(_describe_divergence(chunk.epoch, records, done, self._precision))

    @property
    def final(self) -> KeptWeights:
        """The weights after the last epoch."""
        return self._kept(len(self.epochs))

    @property
    def best(self) -> KeptWeights:
        """The weights of the epoch with the highest validation accuracy, the first of equals."""
        return self._kept(self._best_epoch)

    @property
    def kept(self) -> list[KeptWeights]:
        """The weights of the epochs to keep."""
        return [self._kept(epoch) for epoch in sorted(self._weights) if epoch in self._keep_epochs]

    @property
    def best_record(self) -> EpochRecord:
        """The record of the epoch with the best weights."""
        return self.epochs[self._best_epoch - 1]

    def has_stalled(self, patience: int | None) -> bool:
        """Return whether the best epoch was `patience` epochs ago; False if `patience` is None."""
        return patience is not None and len(self.epochs) - self._best_epoch >= patience

    def describe(self) -> str:
        """Describe the progress of the training in one line."""
        if not self.epochs:
            return "first epoch"
        last = self.epochs[-1]
        return f"epoch {last.epoch} · loss {last.loss:.4f} · validation {last.validation_accuracy:.2%}"

    def as_arrays(self) -> dict[str, np.ndarray]:
        """Return the history as named arrays, for `restore`."""
        arrays = {
            "epochs": np.array([dataclasses.astuple(record) for record in self.epochs], np.float64),
            "best_epoch": np.array(self._best_epoch),
        }
        if self.steps:
            steps = jax.tree.map(lambda *parts: np.stack(parts), *map(_fields, self.steps))
            arrays |= {f"steps.{name}": column for name, column in steps.items()}
        arrays |= {f"dynamics.{name}": np.array(column) for name, column in vars(self.dynamics).items()}
        for epoch, params in self._weights.items():
            arrays |= {f"weights.{epoch}.{index}": leaf for index, leaf in enumerate(jax.tree.leaves(params))}
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from the result of `as_arrays` of the same training, in a new history."""
        for row in arrays["epochs"].reshape(-1, len(dataclasses.fields(EpochRecord))).tolist():
            names = [field.name for field in dataclasses.fields(EpochRecord)]
            self.epochs.append(EpochRecord(**dict(zip(names, row, strict=True)) | {"epoch": int(row[0])}))
        self._best_epoch = int(arrays["best_epoch"])
        columns: Any = _below("steps", arrays)
        absent: Any = {field.name: None for field in dataclasses.fields(StepRecord) if field.name not in columns}
        self.steps = [
            StepRecord(**absent, **{name: column[number] for name, column in columns.items()})
            for number in range(len(self.epochs))
        ]
        vars(self.dynamics).update({name: np.array(column) for name, column in _below("dynamics", arrays).items()})
        leaves_by_epoch: dict[int, dict[int, np.ndarray]] = {}
        for name, leaf in _below("weights", arrays).items():
            epoch, index = map(int, name.split("."))
            leaves_by_epoch.setdefault(epoch, {})[index] = leaf
        structure = jax.tree.structure(self._weights[0])
        self._weights = {
            epoch: jax.tree.unflatten(structure, [leaves[index] for index in range(len(leaves))])
            for epoch, leaves in leaves_by_epoch.items()
        }

    def _kept(self, epoch: int) -> KeptWeights:
        return KeptWeights(epoch=epoch, params=self._weights[epoch])


class LearningDynamics:
    """Statistics of all or of sampled examples of a training split over their visits, one in each epoch.

    In a private training an epoch may leave examples out, or visit them again: the last visit of an epoch counts.
    """

    def __init__(self, num_examples: int):
        self.epochs = np.zeros((), np.int64)  # number of epochs added
        # number of misclassified visits right after a correct one (Toneva et al., arXiv 1812.05159)
        self.forgetting_events: Int[np.ndarray, " examples"] = np.zeros(num_examples, np.int32)
        # first epoch that classified the example correctly, from 1; 0 for none yet
        self.first_correct: Int[np.ndarray, " examples"] = np.zeros(num_examples, np.int32)
        self.was_correct: Bool[np.ndarray, " examples"] = np.zeros(num_examples, bool)
        self.visits: Int[np.ndarray, " examples"] = np.zeros(num_examples, np.int32)
        # sums of the probability of the label, and of its square
        self.sum: Float[np.ndarray, " examples"] = np.zeros(num_examples)
        self.sum_of_squares: Float[np.ndarray, " examples"] = np.zeros(num_examples)

    def add(self, rows: RowRecord) -> None:
        """Add an epoch; a probability that is not finite, after an overflow, counts as 0."""
        indices = np.asarray(rows.indices).ravel()
        visited = indices != PADDING
        order = indices[visited]
        correct, probability = self.was_correct.copy(), np.zeros_like(self.sum)
        correct[order] = np.asarray(rows.correct).ravel()[visited]
        probability[order] = np.nan_to_num(np.asarray(rows.probability, np.float64).ravel()[visited])
        self.epochs = self.epochs + 1
        self.visits[order] += 1
        self.forgetting_events += self.was_correct & ~correct
        self.first_correct[correct & (self.first_correct == 0)] = self.epochs
        self.was_correct = correct
        self.sum += probability
        self.sum_of_squares += probability**2

    @property
    def mean_probability(self) -> Float[np.ndarray, " examples"]:
        """Mean probability of the label over the visits, float32 (Swayamdipta et al., arXiv 2009.10795)."""
        return (self.sum / np.maximum(1, self.visits)).astype(np.float32)

    @property
    def probability_std(self) -> Float[np.ndarray, " examples"]:
        """Standard deviation of the label's probability over the visits, float32: the variability of the same paper."""
        visits = np.maximum(1, self.visits)
        variance = self.sum_of_squares / visits - (self.sum / visits) ** 2
        return np.sqrt(np.maximum(variance, 0)).astype(np.float32)


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


def _fields(steps: StepRecord) -> dict[str, np.ndarray]:
    """Return the columns of records by name, without those that the training does not have."""
    return {name: column for name, column in vars(steps).items() if column is not None}


def _below(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with a prefix and a dot, without these."""
    start = f"{prefix}."
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
