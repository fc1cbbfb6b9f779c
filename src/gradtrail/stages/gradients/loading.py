"""What an analysis of gradients starts from, as each of its processes loads it, and what all of them do with it."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from gradtrail.core.common.sharding import make_mesh
from gradtrail.core.common.split import Split
from gradtrail.core.gradients.analysis import GradientAnalysis, analyze, num_influenced
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.core.gradients.passes import GradientPasses, compile_passes
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.artifacts.privacy import Promise, read_promise
from gradtrail.stages.artifacts.shards import ShardedSplit
from gradtrail.stages.artifacts.splits import HeldSplit, open_large, read_samples
from gradtrail.stages.common import dataset
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.environment import EnvironmentConfig
from gradtrail.stages.common.processes import Processes
from gradtrail.stages.common.stage import Stage
from gradtrail.stages.gradients.every_example import score_every_example
from gradtrail.stages.gradients.inputs import MemberInputs, read_members, to_score

_DATA, _MODELS, _TRAINED = Path("data/processed"), Path("models"), Path("results/train")


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What an analysis starts from.

    Attributes:
        promise: of a private training; else None.
        splits: to score; of a large training split a sample.
        large: that split, to be read in parts; else None.
        first: of the members.
        rest: of the members, read as they are asked for.
        mesh: the device of this process.
        processes: that share it.
    """

    config: GradientsConfig
    info: DatasetInfo
    promise: Promise | None
    splits: Mapping[str, Split]
    large: HeldSplit | ShardedSplit | None
    first: MemberInputs
    rest: Iterator[MemberInputs]
    mesh: Mesh
    processes: Processes

    @property
    def members(self) -> Iterator[MemberInputs]:
        """The members one after the other; to be asked for once."""
        return itertools.chain([self.first], self.rest)

    def compile(self, compiler: Compiler) -> GradientPasses:
        """Compile the passes, which the processes share."""
        return compile_passes(
            self.first.model,
            self.first.about.label_smoothing,
            num_influenced(self.config, len(self.splits["test"])),
            curvature=self.config.curvature_iterations > 0,
            compiler=compiler,
            mesh=self.mesh,
        ).shared_by(self.processes)

    def analyze(
        self, passes: GradientPasses, member: MemberInputs, advance: Callable[..., object] = lambda *_, **__: None
    ) -> GradientAnalysis:
        """Analyse a member; `advance` as in `gradients.analysis`."""
        return analyze(passes, member.trajectory, self.splits, self.config, self.info.num_classes, advance=advance)

    def score_every_example(
        self,
        passes: GradientPasses,
        large: HeldSplit | ShardedSplit,
        path: Path | None,
        advance: Callable[..., object] = lambda *_, **__: None,
    ) -> dict[str, float]:
        """Score the whole of a large training split by the weights of the first member; see `every_example`."""
        weights = self.first.trajectory.params[self.first.trajectory.scored]
        return score_every_example(passes, weights, large, path, advance=advance)

    def follow(self, compiler: Compiler) -> None:
        """Do the share of this process, to the end."""
        passes = self.compile(compiler)
        for member in self.members:
            self.analyze(passes, member)
        if self.large is not None:
            self.score_every_example(passes, self.large, None)


def load_analysis(stage: Stage, config: GradientsConfig) -> Analysis:
    """Read what an analysis starts from, and find the device; JAX must not have looked for any yet.

    Raises:
        UserError: data or weights are missing or damaged, or this process has others than process 0, or other params.
    """
    processes = stage.processes
    info = dataset.read_info(_DATA)
    promise = read_promise(_TRAINED)
    splits = to_score(read_samples(_DATA, info), promise)
    large = open_large(_DATA / "train.npz", info) if len(splits["train"]) else None
    given = read_members(_MODELS, _TRAINED, config.weights, info, splits["train"])
    first = next(given)
    if processes.count > 1:
        made = {dep: digest(Path(dep)) for dep in stage.spec.data_deps if not Path(dep).is_relative_to(_DATA)}
        processes.require_same(
            {
                "gradients of params.yaml": repr(config),
                "environment of params.yaml": repr(stage.params(EnvironmentConfig, "environment")),
                str(_DATA): info.digest,
                **made,
            }
        )
    return Analysis(
        config=config,
        info=info,
        promise=promise,
        splits=splits,
        large=large,
        first=first,
        rest=given,
        mesh=make_mesh([_device(processes)]),
        processes=processes,
    )


def _device(processes: Processes) -> jax.Device:
    """Return the device that this process computes on, of several processes once they are connected."""
    if processes.count == 1:
        return jax.local_devices()[0]
    found: jax.Device = processes.devices(processes.count)[processes.index]
    processes.gather({"nothing": np.zeros(1, np.uint8)}, [1] * processes.count)  # compiles what gathers
    return found
