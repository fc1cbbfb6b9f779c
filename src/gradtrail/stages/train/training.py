"""Loading and compiling a training, in each of its processes; process 0 also writes and logs."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Int

from gradtrail.core.data import Split
from gradtrail.core.nn.models import Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.loop import Program
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.stages.artifacts import accounting, splits
from gradtrail.stages.artifacts.accounting import Spending
from gradtrail.stages.artifacts.shards import ShardedSplit
from gradtrail.stages.artifacts.splits import InMemorySource
from gradtrail.stages.common import dataset
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.stages.common.environment import EnvironmentConfig
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.processes import agreed, devices, require_same
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.train.checkpoints import Checkpoints, checkpoint_folder
from gradtrail.stages.train.loop import Members, NullListener, train_members
from gradtrail.stages.train.secret import read_secret, training_secret
from gradtrail.support.memory import require_memory

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Training:
    """The inputs of a training."""

    config: TrainConfig
    runtime: RuntimeConfig
    info: DatasetInfo
    train: Split | InMemorySource | ShardedSplit  # training split, whole or streamed in parts
    spending: Spending | None  # privacy budget of a private training; else None
    devices: Sequence[jax.Device]  # one for each shard, of all processes
    steps_per_call: int  # value of `runtime` in process 0
    secret: str | None = field(repr=False)

    @property
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
        return splits.sample_rows(len(self.train))

    @property
    def sampled_id(self) -> Int[np.ndarray, " sampled"]:
        """The `example_id` of each of these."""
        if isinstance(self.train, ShardedSplit):
            return self.train.take_column("example_id", self.sampled)
        return self.train.example_id[self.sampled]

    def compile(self, compiler: Compiler) -> Program:
        """Compile the functions of the training.

        Raises:
            ConfigError: the training cannot be made of these data; one line.
        """
        noise = self.spending.noise_multiplier if self.spending else None
        streamed = not isinstance(self.train, Split)
        program = loop.make_program(
            self.config,
            self.model,
            len(self.train),
            self.devices,
            noise_multiplier=noise,
            streamed=streamed,
            sampled=self.sampled if len(self.sampled) < len(self.train) else None,
        )
        return program.compile(compiler)

    def require_memory(self, engine: Program, functions: Sequence[CompiledFunction]) -> None:
        """Refuse a batch that does not fit, before any of the memory is allocated.

        Raises:
            ConfigError: too little memory; one line with the batch size that fits.
        """
        fixed = engine.argument_bytes
        require_memory("train.batch_size", self.config.batch_size, functions, fixed_bytes=fixed)

    def checkpoints(self, state: str, user: str = "") -> Checkpoints:
        """Return the checkpoints of the state with this key, which is read in process 0; none under a debug switch."""
        folder = checkpoint_folder(state, self.config.shards)
        debugging = self.runtime.debug_nans or self.runtime.disable_jit
        user = "" if user == state else user
        return Checkpoints(None if debugging else folder, self.runtime.checkpoint_seconds, user=user)

    def members(
        self,
        checkpoints: Callable[[MemberSeeds], AbstractContextManager[Checkpoints]],
        inputs_changed: Callable[[], bool] = lambda: False,
    ) -> Members:
        """Return what the members have in common; see there for the arguments."""
        return Members(
            checkpoints=checkpoints,
            secret=training_secret(self.secret, self.config, self.train) if isinstance(self.train, Split) else None,
            epsilons=self.epsilons,
            inputs_changed=inputs_changed,
        )

    def follow(self, compiler: Compiler) -> None:
        """Train with process 0, to the end."""

        @contextlib.contextmanager
        def checkpoints(_: MemberSeeds) -> Iterator[Checkpoints]:
            yield self.checkpoints("")

        agreed(lambda: None)  # process 0 has compiled: its functions are in the cache
        results = train_members(
            self.compile(compiler),
            in_first_process(_unknown),
            self.train,
            self.config,
            members=self.members(checkpoints),
            listener=NullListener(),
            steps_per_call=self.steps_per_call,
        )
        for _ in results:
            pass


def load_training(folder: Path, config: TrainConfig, runtime: RuntimeConfig) -> Training:
    """Read the inputs of a training, and find the devices of its shards; JAX must not have looked for any yet.

    Args:
        folder: `data/processed`.
        config: params of the training.
        runtime: settings of the run.

    Raises:
        UserError: data or secret are missing or damaged, or this process has other data or params than process 0.
        ConfigError: the processes cannot have equally many shards, or no noise keeps the budget of a private training.
    """
    info = dataset.read_info(folder)
    private = config.privacy.enabled
    train = splits.open_train(folder / "train.npz", info, stream_above_mib=runtime.stream_above_mib, private=private)
    environment = repr(load_section("environment", EnvironmentConfig))
    require_same(
        {"train of params.yaml": repr(config), "environment of params.yaml": environment, str(folder): info.digest}
    )
    return Training(
        config=config,
        runtime=runtime,
        info=info,
        train=train,
        secret=read_secret(config.privacy),
        spending=accounting.account(config, len(train)) if private else None,
        devices=devices(config.shards),
        steps_per_call=agreed(lambda: runtime.steps_per_call),
    )


def in_first_process(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function with the result of `function` in process 0, which alone calls it."""
    return lambda *args: agreed(functools.partial(function, *args))


def _unknown(*_: object) -> dict[str, float]:
    raise AssertionError("process 0 alone validates")
