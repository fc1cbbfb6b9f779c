"""The history of a training on the host: records of steps and epochs, kept weights, and learning dynamics."""

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
from gradtrail.core.train.step import AVERAGED

# Metrics of an epoch by name: `epoch`, its number from 1; means of the steps' metrics `AVERAGED` over the steps that
# have examples and were not skipped; `validation_loss`, the cross-entropy in nats, and `validation_accuracy` after it
EpochMetrics = dict[str, float]
EPOCH_METRICS = ("epoch", *AVERAGED, "validation_loss", "validation_accuracy")
StepMetrics = dict[str, np.ndarray]  # metrics of the steps of an epoch on the host; see `metric_types`


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
        self.epochs: list[EpochMetrics] = []
        self.steps: list[StepMetrics] = []  # of each epoch
        self.dynamics = LearningDynamics(num_examples)
        self._precision = precision
        self._keep_epochs = frozenset(keep_epochs)
        self._best_epoch = 0
        self._weights = {0: params}  # by epoch: those to keep, the best ones and the last ones

    def add(self, chunk: Chunk, params: HostParams, validation: Mapping[str, float]) -> EpochMetrics:
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
        steps: StepMetrics = jax.device_get(chunk.records.metrics)
        done = _is_finite(steps)
        if not done.any():
            raise FloatingPointError(_describe_divergence(chunk.epoch, steps, done, self._precision))
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
            raise FloatingPointError(
                f"training diverged: the weights after epoch {chunk.epoch} are not finite, at learning rate "
                f"{steps['learning_rate'][-1]:.4g} in {self._precision}; try a lower learning rate, or train.clip_norm"
            )
        # A batch without examples, all removed or none drawn, has no loss
        has_examples = steps["num_examples"] > 0
        measured = {name: np.where(has_examples, steps[name], np.float32(np.nan)) for name in AVERAGED if name in steps}
        means = {
            name: float(np.mean(values[done & has_examples], dtype=np.float64)) for name, values in measured.items()
        }
        epoch = {
            "epoch": chunk.epoch,
            **means,
            "validation_loss": validation["loss"],
            "validation_accuracy": validation["accuracy"],
        }
        if not self.epochs or epoch["validation_accuracy"] > self.best_epoch["validation_accuracy"]:
            self._best_epoch = chunk.epoch
        self.epochs.append(epoch)
        self.steps.append(steps | measured)
        self.dynamics.add(chunk.records.rows)
        needed = self._keep_epochs | {self._best_epoch}
        earlier = {epoch: weights for epoch, weights in self._weights.items() if epoch in needed}
        self._weights = earlier | {chunk.epoch: params}
        return epoch

    def check(self, chunk: Chunk) -> None:
        """Raise FloatingPointError if a loss or gradient of the epoch so far is not finite; not under loss scaling."""
        steps = chunk.records.metrics
        if "skipped" in steps:
            return
        done = _is_finite(steps)
        if not done.all():  # entries of later steps are 0
            raise FloatingPointError(_describe_divergence(chunk.epoch, jax.device_get(steps), done, self._precision))

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
    def best_epoch(self) -> EpochMetrics:
        """The metrics of the epoch with the best weights."""
        return self.epochs[self._best_epoch - 1]

    def has_stalled(self, patience: int | None) -> bool:
        """Return whether the best epoch was `patience` epochs ago; False if `patience` is None."""
        return patience is not None and len(self.epochs) - self._best_epoch >= patience

    def describe(self) -> str:
        """Describe the progress of the training in one line."""
        if not self.epochs:
            return "first epoch"
        last = self.epochs[-1]
        return f"epoch {last['epoch']} · loss {last['loss']:.4f} · validation {last['validation_accuracy']:.2%}"

    def as_arrays(self) -> dict[str, np.ndarray]:
        """Return the history as named arrays, for `restore`."""
        arrays = {"best_epoch": np.array(self._best_epoch)}
        sequences: dict[str, list[Any]] = {"epochs": self.epochs, "steps": self.steps}
        for prefix, parts in sequences.items():
            columns = jax.tree.map(lambda *values: np.stack(values), *parts) if parts else {}
            arrays |= {f"{prefix}.{name}": column for name, column in columns.items()}
        arrays |= {f"dynamics.{name}": np.array(column) for name, column in vars(self.dynamics).items()}
        for epoch, params in self._weights.items():
            arrays |= {f"weights.{epoch}.{index}": leaf for index, leaf in enumerate(jax.tree.leaves(params))}
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from the result of `as_arrays` of the same training, in a new history."""
        self._best_epoch = int(arrays["best_epoch"])
        steps, epochs = _below("steps", arrays), _below("epochs", arrays)
        for number in range(len(epochs.get("epoch", ()))):
            self.epochs.append({name: epochs[name][number].item() for name in EPOCH_METRICS if name in epochs})
            self.steps.append({name: column[number] for name, column in steps.items()})
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


def _is_finite(steps: Mapping[str, Any]) -> Bool[np.ndarray, " steps"]:
    """Return whether loss and gradient of each step are finite."""
    return np.isfinite(np.asarray(steps["loss"])) & np.isfinite(np.asarray(steps["grad_norm"]))


def _describe_divergence(epoch: int, steps: StepMetrics, done: np.ndarray, precision: Precision) -> str:
    """Describe in one line the first step that is not finite."""
    step, losses = int(np.argmin(done)), steps["loss"]
    last = f"the last finite loss was {losses[step - 1]:.4g}" if step else "and so are all after it"
    quantity = "loss" if not np.isfinite(losses[step]) else "gradient"
    return (
        f"training diverged: the {quantity} of step {step + 1} in epoch {epoch} is not finite, {last}, at learning "
        f"rate {steps['learning_rate'][step]:.4g} in {precision}; try a lower learning rate, or train.clip_norm"
    )


def _below(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with a prefix and a dot, without these."""
    start = f"{prefix}."
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
