"""Loading and compiling a training, in each of its processes; process 0 also writes and logs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from gradtrail.core.data import Split
from gradtrail.core.nn.models import Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.loop import Engine
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.stages.artifacts import accounting, splits
from gradtrail.stages.artifacts.accounting import Spending
from gradtrail.stages.artifacts.shards import ShardedSplit
from gradtrail.stages.artifacts.splits import InMemorySource
from gradtrail.stages.common import dataset
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.stages.common.environment import EnvironmentConfig
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.processes import Processes
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.train.checkpointing import ResumeFolder, resume_folder
from gradtrail.stages.train.loop import Members, NullListener, train_members
from gradtrail.stages.train.secret import read_secret, training_secret
from gradtrail.support.memory import require_memory


@dataclass(frozen=True, kw_only=True)
class Training:
    """The inputs of a training."""

    config: TrainConfig
    runtime: RuntimeConfig
    info: DatasetInfo
    train: Split | InMemorySource | ShardedSplit  # training split, whole or streamed in parts
    spending: Spending | None  # privacy budget of a private training; else None
    devices: Sequence[jax.Device]  # one for each shard, of all processes
    processes: Processes  # processes that train together
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

    def compile(self, compiler: Compiler) -> Engine:
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
        return loop.compile_engine(program, compiler=compiler)

    def require_memory(self, engine: Engine, functions: Sequence[CompiledFunction]) -> None:
        """Refuse a batch that does not fit, before any of the memory is allocated.

        Raises:
            ConfigError: too little memory; one line with the batch size that fits.
        """
        fixed = engine.run_steps.cost.argument_bytes
        require_memory("train.batch_size", self.config.batch_size, functions, fixed_bytes=fixed)

    def checkpoints(self, state: str, **options: Any) -> ResumeFolder:
        """Return the checkpoints of the state with this key, see `resume_folder`; in process 0 it must be the key."""
        clock = time.monotonic
        return resume_folder(state, self.runtime, self.config.shards, processes=self.processes, clock=clock, **options)

    def members(self, checkpoints: Callable[[MemberSeeds], AbstractContextManager[ResumeFolder]]) -> Members:
        """Return what the members have in common; see there for `checkpoints`."""
        return Members(
            checkpoints=checkpoints,
            secret=training_secret(self.secret, self.config, self.train) if isinstance(self.train, Split) else None,
            epsilons=self.epsilons,
            processes=self.processes,
        )

    def follow(self, compiler: Compiler) -> None:
        """Train with process 0, to the end."""

        @contextlib.contextmanager
        def checkpoints(_: MemberSeeds) -> Iterator[ResumeFolder]:
            yield self.checkpoints("")

        self.processes.agreed(lambda: None)  # process 0 has compiled: its functions are in the cache
        results = train_members(
            self.compile(compiler),
            self.processes.in_first_process(_unknown),
            self.train,
            self.config,
            members=self.members(checkpoints),
            listener=NullListener(),
            steps_per_call=self.steps_per_call,
        )
        for _ in results:
            pass


def load_training(folder: Path, config: TrainConfig, runtime: RuntimeConfig, processes: Processes) -> Training:
    """Read the inputs of a training, and find the devices of its shards; JAX must not have looked for any yet.

    Args:
        folder: `data/processed`.
        config: params of the training.
        runtime: settings of the run.
        processes: processes that train together.

    Raises:
        UserError: data or secret are missing or damaged, or this process has other data or params than process 0.
        ConfigError: the processes cannot have equally many shards, or no noise keeps the budget of a private training.
    """
    info = dataset.read_info(folder)
    private = config.privacy.enabled
    train = splits.open_train(folder / "train.npz", info, stream_above_mib=runtime.stream_above_mib, private=private)
    environment = repr(load_section("environment", EnvironmentConfig))
    processes.require_same(
        {"train of params.yaml": repr(config), "environment of params.yaml": environment, str(folder): info.digest}
    )
    return Training(
        config=config,
        runtime=runtime,
        info=info,
        train=train,
        secret=read_secret(config.privacy),
        spending=accounting.account(config, len(train)) if private else None,
        devices=processes.devices(config.shards),
        processes=processes,
        steps_per_call=processes.agreed(lambda: runtime.steps_per_call),
    )


def _unknown(*_: object) -> dict[str, float]:
    raise AssertionError("process 0 alone validates")
