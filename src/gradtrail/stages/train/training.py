"""A training of one network, or of several that differ in their seeds: reads its inputs, compiles, runs and resumes.

Each of several processes runs the same code; process 0 validates, logs and writes.
"""

import contextlib
import dataclasses
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.data import REMOVED, Split
from gradtrail.core.gradient_check import check_gradients
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.train import loop
from gradtrail.core.train.changes import changed_labels, weight_changes
from gradtrail.core.train.config import MemberSeeds, TrainConfig, for_split
from gradtrail.core.train.dp_sgd import rows_at_once
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.history import History, on_host
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import Chunk, CompiledTraining
from gradtrail.core.train.step import RunKeys, StepRecord, TrainState, started_from
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.core.xla.passes import Pass
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, kind_of_processor
from gradtrail.stages.common.processes import agreed, devices, first_process_first, leave, require_same, wait_for_all
from gradtrail.stages.common.stage import Stage
from gradtrail.stages.data import data_files
from gradtrail.stages.data.data_files import DatasetInfo
from gradtrail.stages.dp import accounting
from gradtrail.stages.dp.accounting import Spending
from gradtrail.stages.dp.redaction import training_secret
from gradtrail.stages.model.start import Start, read_start
from gradtrail.stages.train.checkpoints import Checkpoints, checkpoint_folder, on_devices, state_on_device
from gradtrail.support.errors import UserError
from gradtrail.support.goodput import Stopwatch
from gradtrail.support.memory import require_memory, require_memory_for_model
from gradtrail.support.paths import same_command
from gradtrail.support.progress import progress_bar
from gradtrail.support.signals import Stopped, stop_request

LARGEST_ON_DEVICE = 2**28  # bytes of images; a larger training or validation split is streamed


class Listener(Protocol):
    """What logs a training while it runs; it cannot change it."""

    def member(self, training: "Training", seeds: MemberSeeds) -> AbstractContextManager[Checkpoints]:
        """Return the checkpoints of a network, which no other process uses meanwhile."""

    def after_epoch(self, history: History, seconds: float) -> None:
        """Receive the history, whose last epoch has just ended, and the seconds of training until then."""

    def diverged(self, chunk: Chunk) -> None:
        """Receive the steps of the epoch in which the training diverged."""


class NullListener:
    """A listener that logs nothing: that of a process that is not the first."""

    @contextlib.contextmanager
    def member(self, training: "Training", seeds: MemberSeeds) -> Iterator[Checkpoints]:  # noqa: ARG002
        """Yield the checkpoints that process 0 writes."""
        yield training.checkpoints("")

    def after_epoch(self, history: History, seconds: float) -> None:
        """Do nothing."""

    def diverged(self, chunk: Chunk) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A trained network."""

    state: TrainState
    history: History
    seconds: float  # time of the loop, summed over all attempts


@dataclass(kw_only=True)
class Training:
    """The inputs of a training, and its compiled functions."""

    config: TrainConfig
    runtime: RuntimeConfig
    info: DatasetInfo
    train: Split
    validation: Split
    devices: Sequence[jax.Device]  # one for each shard, of all processes
    steps_per_call: int  # steps between two signs of progress; changes no bit of the result
    spending: Spending | None = None  # privacy budget of a private training; else None
    # secret behind batches and noise of a private training; None for the seed. No checkpoint has it, nor its keys.
    secret: str | None = field(default=None, repr=False)
    start: Start | None = None  # weights that it starts from; None for random ones
    inputs_changed: Callable[[], bool] = lambda: False  # True if the results will not be recorded
    require_data: Callable[[], None] = lambda: None  # raises UserError once data were touched
    # label of each example of `train` after `config.changes`, or `data.REMOVED`; None without changes
    changed_labels: Int[np.ndarray, " examples"] | None = None
    compiled: CompiledTraining = field(init=False, repr=False)
    score: Pass = field(init=False, repr=False)  # of the validation split
    stopwatch: Stopwatch = field(default_factory=lambda: Stopwatch({}), repr=False)

    @classmethod
    def load(cls, stage: Stage) -> "Training":
        """Read the inputs of the stage, and find the devices; JAX must not have looked for any yet.

        Raises:
            UserError: data, secret or first weights are missing or damaged, this process has other data or params than
                process 0, a streamed split has changes, or all members would be the same.
            ConfigError: the processes cannot have equally many shards, no noise keeps the privacy budget, the changes
                do not fit the split, or a network of one's own is refused.
        """
        config, runtime, folder = stage.params(TrainConfig), stage.runtime, Path("data/processed")
        environment = stage.params(EnvironmentConfig, "environment")
        info = data_files.read_info(folder)
        is_private = config.privacy.enabled
        train = data_files.read_split(folder / "train")
        require_same(
            {
                "train of params.yaml": repr(config),
                "environment of params.yaml": repr(environment),
                "the processor": kind_of_processor(environment),
                str(folder): info.digest,
            }
        )
        if is_private and config.loss.class_weights == "balanced":
            raise UserError(
                f"train.{config.loss.kind}.class_weights must be empty or numbers with train.privacy.enabled, got "
                "balanced: no noise covers the sizes of the classes"
            )
        training = cls(
            config=for_split(config, train, info.num_classes),
            runtime=runtime,
            info=info,
            train=train,
            validation=data_files.read_split(folder / "validation"),
            devices=devices(config.shards),
            steps_per_call=agreed(lambda: runtime.steps_per_call),
            spending=accounting.account(config, len(train)) if is_private else None,
            secret=training_secret(config, train),
            inputs_changed=stage.inputs.have_changed,
            require_data=stage.inputs.require_data,
        )
        if config.start.enabled:
            training.start = read_start(config.start, training.model)
            try:
                training.config = dataclasses.replace(training.config, start=training.start.config)
            except ValueError as error:
                raise UserError(f"train.{error}") from None
        if config.augmentation.moves and "index" in runtime.checkify:
            raise UserError("runtime.checkify: index cannot check train.augmentation, which reads outside of images")
        if config.changes.enabled and training.is_streamed:
            raise UserError(
                f"train.changes must be empty for a training split of more than {LARGEST_ON_DEVICE // 2**20} MiB, "
                f"which is streamed; this one has {train.images.nbytes // 2**20:,} MiB"
            )
        if config.changes.enabled:
            training.changed_labels = changed_labels(config.changes, train.labels, train.example_id, info.num_classes)
        check_gradients(training.model, batch_size=rows_at_once(config, training.model))
        return training

    @functools.cached_property
    def model(self) -> Model:
        """The network to train."""
        config = self.config.model_config(self.info.image_shape, self.info.num_classes)
        return Model(config, remat=self.config.remat)

    @property
    def epsilons(self) -> Sequence[float]:
        """The epsilon of a private training after each epoch; else empty."""
        return self.spending.epsilons if self.spending else ()

    @property
    def sampled(self) -> Int[np.ndarray, " sampled"]:
        """Positions of the training examples whose learning dynamics are recorded: of a large split a sample."""
        return data_files.sample_rows(len(self.train))

    @property
    def sampled_id(self) -> Int[np.ndarray, " sampled"]:
        """The `example_id` of each of these."""
        return self.train.example_id[self.sampled]

    @property
    def removed_id(self) -> Int[np.ndarray, " removed"]:
        """The `example_id` of each training example that `config.changes` removes."""
        return self.train.example_id[slice(0) if self.changed_labels is None else self.changed_labels == REMOVED]

    @property
    def num_changed(self) -> dict[str, int]:
        """Numbers of removed and of relabeled training examples, as metrics; nothing without changes."""
        if self.changed_labels is None:
            return {}
        changed, removed = int(np.sum(self.changed_labels != self.train.labels)), len(self.removed_id)
        return {"removed_examples": removed, "relabeled_examples": changed - removed}

    @functools.cached_property
    def weight_changes(self) -> Float[np.ndarray, "examples classes"] | None:
        """The changes of the weights of the training examples; None without changes."""
        if self.changed_labels is None:
            return None
        return weight_changes(self.train.labels, self.changed_labels, self.info.num_classes)

    @property
    def is_streamed(self) -> bool:
        """Whether blocks of the split are copied to the device, not the whole; a private training samples the whole."""
        return not self.config.privacy.enabled and self.train.images.nbytes > LARGEST_ON_DEVICE

    @property
    def validates_from_host(self) -> bool:
        """Whether batches of the validation split are copied to one device."""
        return self.validation.images.nbytes > LARGEST_ON_DEVICE

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        return [*self.compiled.functions, self.score.function]

    def compile(self, compiler: Compiler) -> None:
        """Compile the functions of the training, in process 0 first: the others find them in the cache.

        Raises:
            ConfigError: the training cannot be made of these data, or a batch does not fit into memory; one line.
        """
        functions = loop.TrainingFunctions(
            self.config,
            self.model,
            len(self.train),
            self.devices,
            noise_multiplier=self.spending.noise_multiplier if self.spending else None,
            streamed=self.is_streamed,
            sampled=self.sampled if len(self.sampled) < len(self.train) else None,
        )
        if self.weight_changes is not None:
            functions = functions.with_weight_changes()
        with first_process_first(), self.stopwatch.phase("compile"):
            self.compiled = compiled = functions.compile(compiler)
            if self.validates_from_host:
                self.score = inference.compile_predict_within(self.model, compiler=compiler)
            else:
                self.score = loop.compile_validate(self.model, len(self.validation), compiled.mesh, compiler=compiler)
        fixed = self.compiled.run_steps.cost.argument_bytes
        require_memory("train.batch_size", self.config.batch_size, self.compiled.functions, fixed_bytes=fixed)
        require_memory_for_model("train", [self.score.function], host_bytes=0)

    def checkpoints(self, state: str, user: str = "") -> Checkpoints:
        """Return the checkpoints of the state with this key, which is read in process 0; none under `disable_jit`."""
        folder = checkpoint_folder(state, self.config.shards)
        user = "" if user == state else user
        return Checkpoints(None if self.runtime.disable_jit else folder, self.runtime.checkpoint_seconds, user=user)

    def run(self, listener: Listener, add: Callable[[int, TrainResult], object]) -> None:
        """Train the networks one after the other, and pass the seed and the result of each to `add`.

        Raises:
            FloatingPointError: a training diverged; one line.
            UserError: data were touched meanwhile.
            Stopped: the process was asked to stop; a checkpoint was written.
        """
        wait_for_all()
        for seed in self.config.seeds:
            seeds = self.config.seeds_of(seed)
            with listener.member(self, seeds) as checkpoints:
                name = f"train seed {seed}" if self.config.members > 1 else "train"
                with self.stopwatch.phase("preparation"):
                    result = self.train_network(seeds, checkpoints, listener, name)
                add(seed, result)
                self.stopwatch.phase("checkpoint_save")(checkpoints.wait)()
        self.require_data()  # each process has read its own files, and process 0 waits for all
        wait_for_all()
        leave()

    def train_network(
        self, seeds: MemberSeeds, checkpoints: Checkpoints, listener: Listener, name: str = "train"
    ) -> TrainResult:
        """Train a network to its end, from its last checkpoint if there is one; `name` is for messages."""
        compiled, config, phase = self.compiled, self.config, self.stopwatch.phase
        images, labels, changes = self.train.images, self.train.labels, self.weight_changes
        examples = self.train if self.is_streamed else loop.on_device(images, labels, compiled.mesh, changes)

        # The first state, or that of the last checkpoint
        state = compiled.init(keys_of(seeds, self.secret))
        state = started_from(state, self.start.tensors) if self.start else state
        secret_keys, public_keys = state.keys, compiled.init(keys_of(seeds)).keys if self.secret else None
        params = on_host(state.params)
        history = History(config.keep_epochs, params, len(self.sampled), config.precision)
        restored = phase("checkpoint_restore")(self._restored)
        state, records, seconds_before = restored(checkpoints, state, history, secret_keys)
        is_over = self._is_over(int(state.step), history)
        if int(state.step):
            how = "trained before" if is_over else f"resuming after step {int(state.step):,}"
            print(f"{name}: {how}, from a checkpoint", file=sys.stderr)
        self.stopwatch.reached(name, int(state.step), resumes=True)
        started = time.perf_counter() - seconds_before

        wait_for_all()
        with progress_bar(name, compiled.num_steps, unit="steps") as bar, stop_request() as request, phase("steps"):
            size, waiting = self.steps_per_call, self.stopwatch.waiting
            chunks = compiled.train(state, examples, steps_per_call=size, records=records, waiting=waiting)
            for chunk in () if is_over else guarded(chunks, self.runtime):
                # Validate and log at the end of an epoch; the devices validate before the host waits for the steps
                state, seconds = chunk.state, time.perf_counter() - started
                try:
                    with phase("validation"):
                        validated = self.validate(state.evaluation_params) if chunk.ends_epoch else None
                    history.check(chunk)
                    if validated:
                        jax.block_until_ready(chunk.records)  # as `check` does, but not under loss scaling
                        with phase("validation"):
                            params = on_host(state.evaluation_params)
                            history.add(chunk, params, agreed(validated))
                except FloatingPointError:
                    listener.diverged(chunk)
                    raise
                self.stopwatch.reached(name, chunk.step)
                line = self._describe(history)
                bar.update(chunk.step, message=line)
                if bar.is_drawn:
                    bar.draw(self._curves(chunk, history))
                if chunk.ends_epoch:
                    bar.log(f"{name}: {line} ({chunk.epoch}/{config.epochs}, {seconds:.1f} s)")
                    listener.after_epoch(history, seconds)

                # Stop, end, or go on; all processes alike
                parts = functools.partial(self._parts, _with_keys(state, public_keys), chunk, history, seconds)
                is_over = self._is_over(chunk.step, history)
                if chunk.ends_epoch and chunk.epoch == self.runtime.stop_after_epoch and not is_over:
                    request.number = signal.SIGTERM
                if (stop := agreed(lambda: request.number)) is not None:
                    phase("checkpoint_save")(checkpoints.save)(chunk.step, parts)
                    agreed(lambda: None)  # the other processes end when it is written
                    how = f"stopped after step {chunk.step:,} of {compiled.num_steps:,}"
                    raise Stopped(f"{how}; {same_command()} resumes from there", stop)
                if is_over:
                    phase("checkpoint_save")(self._save_last)(checkpoints, chunk.step, parts)
                    break
                phase("checkpoint_save")(checkpoints.save_if_due)(chunk.step, parts)
        seconds = time.perf_counter() - started
        return TrainResult(state=_with_keys(state, public_keys), history=history, seconds=seconds)

    def validate(self, params: Params) -> Callable[[], dict[str, float]]:
        """Start the validation, in every process; the function returned waits for the mean `loss` and `accuracy`."""
        if self.validates_from_host:
            return lambda: inference.validate(self.score, on_host(params), self.validation)
        return functools.partial(inference.mean_scores, self.score.function(params, self._validation_on_device))

    @functools.cached_property
    def _validation_on_device(self) -> Examples:
        return loop.on_device(self.validation.images, self.validation.labels, self.compiled.mesh)

    def _is_over(self, step: int, history: History) -> bool:
        ends_epoch = step > 0 and step % self.compiled.steps_per_epoch == 0
        return step == self.compiled.num_steps or (ends_epoch and history.has_stalled(self.config.patience))

    def _restored(
        self, checkpoints: Checkpoints, first: TrainState, history: History, keys: RunKeys
    ) -> tuple[TrainState, StepRecord | None, float]:
        """Fill the history from the last checkpoint; return state, records of an unfinished epoch, and seconds."""
        like = self.compiled.records()
        parts = checkpoints.restore({"state": first, "records": like})
        if parts is None:
            return first, None, 0.0
        history.restore(parts["history"])
        state = dataclasses.replace(state_on_device(parts["state"], first), keys=keys)
        records = parts["records"] and on_devices(parts["records"], like)
        return state, records, float(parts["history"]["seconds"])

    def _save_last(self, checkpoints: Checkpoints, step: int, parts: Callable[[], dict[str, Any]]) -> None:
        """Keep the checkpoint of a network that other trainings may have too, or one that will not be recorded."""
        if self.config.members > 1:
            checkpoints.keep(step, parts)
        elif self.inputs_changed():
            checkpoints.save(step, parts)

    def _parts(self, state: TrainState, chunk: Chunk, history: History, seconds: float) -> dict[str, Any]:
        """Return the parts of a checkpoint; the records are those of an unfinished epoch.

        Raises:
            UserError: data were touched, so that a resumed training could go on from other data than it records.
        """
        self.require_data()
        records = {} if chunk.ends_epoch else {"records": chunk.records}
        return {"state": state, "history": history.as_arrays() | {"seconds": np.array(seconds)}} | records

    def _describe(self, history: History) -> str:
        """Return the line of progress: the last epoch, and what a private training has spent until its end."""
        spent = self.epsilons[: len(history.epochs)]
        return f"{history.describe()} · epsilon {spent[-1]:.3g}" if spent else history.describe()

    def _curves(self, chunk: Chunk, history: History) -> dict[str, tuple[np.ndarray, str]]:
        """Return the loss of each step and the validation error of each epoch, NaN for those to come."""
        losses = np.full(self.compiled.num_steps, np.nan)
        parts = [part["loss"] for part in history.steps] + ([] if chunk.ends_epoch else [chunk.records.metrics["loss"]])
        losses[: chunk.step] = np.concatenate(parts)[: chunk.step]  # entries of later steps are 0
        errors = np.full(self.config.epochs, np.nan)
        errors[: len(history.epochs)] = [1 - epoch["validation_accuracy"] for epoch in history.epochs]
        return {"loss": (losses, ".4g"), "validation error": (errors, ".2%")}


def guarded(chunks: Iterator[Chunk], runtime: RuntimeConfig) -> Iterator[Chunk]:
    """Return the chunks; their steps are made under JAX's guards of transfers and threads."""

    def advance() -> Chunk | None:
        with jax.transfer_guard(runtime.transfer_guard), jax.thread_guard(runtime.thread_guard):
            return next(chunks, None)

    return iter(advance, None)


def _with_keys(state: TrainState, keys: RunKeys | None) -> TrainState:
    """Return a state with the keys of the seeds in place of those of a secret, if there are any.

    No step changes the keys of a state. With the keys of a secret one could remove the noise.
    """
    return state if keys is None else dataclasses.replace(state, keys=keys)
