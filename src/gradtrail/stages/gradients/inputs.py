"""The inputs of the gradient analysis: examples, kept weights and learning dynamics."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd

from gradtrail.core.data import Split
from gradtrail.core.gradients.analysis import GradientsConfig, Trajectory, affordable_examples, analysis_flops
from gradtrail.core.gradients.chunks import chunk_bytes
from gradtrail.core.gradients.passes import GradientPasses, compile_passes
from gradtrail.core.nn.models import HostParams, Model, Params, WeightsKind, num_parameters
from gradtrail.core.per_example import unknown_layers
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.data.data_files import DatasetInfo, sample_rows
from gradtrail.stages.data.parquet import read_parquet
from gradtrail.stages.dp.guarantee import PrivacyGuarantee, read_guarantee
from gradtrail.stages.model import weights
from gradtrail.stages.model.members import read_folders, weights_paths
from gradtrail.support.errors import UserError
from gradtrail.support.memory import require_memory_for_model

Rows: TypeAlias = np.ndarray | slice  # positions of examples
DYNAMICS = ("example_id", "forgetting_events", "first_correct_epoch", "mean_probability", "probability_std")


@dataclass(frozen=True, kw_only=True)
class MemberInputs:
    """The inputs of the analysis from the training of one member."""

    seed: int
    model: Model
    about: weights.WeightsInfo  # metadata of the weights to score
    trajectory: Trajectory
    dynamics: Mapping[str, np.ndarray]  # learning dynamics of each training example, in the order of the split

    @property
    def params(self) -> Params | HostParams:
        """Parameters of the scored epoch."""
        return self.trajectory.params[self.trajectory.scored]


def scored_splits(splits: Mapping[str, Split], guarantee: PrivacyGuarantee | None) -> dict[str, Split]:
    """Return the splits to score; the training split of a training to publish has no examples.

    So nothing in the outputs can come from a training example.
    """
    return take_train(splits, slice(0)) if guarantee and guarantee.release else dict(splits)


def take_train(splits: Mapping[str, Split], rows: Rows) -> dict[str, Split]:
    """Return the splits with the training examples at these positions only."""
    return {**splits, "train": splits["train"][rows]}


def read_members(
    models: Path, results: Path, scored: WeightsKind, dataset: DatasetInfo, train: Split
) -> Iterator[MemberInputs]:
    """Yield the inputs of each member, read on demand.

    Raises:
        UserError: one line; a file is missing or damaged, or of another model or data set.
    """
    guarantee = read_guarantee(results)
    folders, result_folders = (read_folders(folder, models) for folder in (models, results))
    for seed, model, params, about in weights.read_members(weights_paths(models, scored), dataset):
        files = [weights.read_weights(path) for path in sorted((folders[seed] / "epochs").glob("*.safetensors"))]
        by_epoch = {info.epoch: epoch_params for _, epoch_params, info in files} | {about.epoch: params}
        trajectory = read_trajectory(result_folders[seed], by_epoch, about.epoch, guarantee)
        dynamics = read_dynamics(result_folders[seed], train)
        yield MemberInputs(seed=seed, model=model, about=about, trajectory=trajectory, dynamics=dynamics)


def read_trajectory(
    results: Path, params: Mapping[int, Params], scored: int, guarantee: PrivacyGuarantee | None
) -> Trajectory:
    """Read the batch size of a training: the mean one of a private training, or of one without some examples."""
    sizes = read_parquet(results / "steps.parquet", ("num_examples",))["num_examples"].to_numpy()
    by_epoch = sizes.reshape(len(pd.read_csv(results / "epochs.csv")), -1)
    mean = round(np.mean(by_epoch[:, :-1] if by_epoch.shape[1] > 1 else by_epoch))  # the last one may be smaller
    return Trajectory(params=params, scored=scored, batch_size=guarantee.batch_size if guarantee else mean)


def read_dynamics(results: Path, train: Split) -> Mapping[str, np.ndarray]:
    """Read the learning dynamics of each training example, in the order of the split, or of a sample of a large split.

    Raises:
        UserError: the file is missing, or has other examples than the split.
    """
    path = results / "dynamics.parquet"
    table = read_parquet(path, DYNAMICS)
    rows = sample_rows(len(table))
    columns = {name: table[name].to_numpy()[rows] for name in DYNAMICS}
    if not np.array_equal(columns.pop("example_id"), train.example_id):
        raise UserError(f"{path}: has other examples than the training split; run `dvc repro`")
    return columns


def compile_all(member: MemberInputs, *, compiler: Compiler) -> GradientPasses:
    """Compile the passes, and require the memory that they need.

    Layers whose per-example gradients have no fast implementation cost a warning of one line.
    """
    model = member.model
    passes = compile_passes(model, member.about.loss, compiler=compiler)
    if layers := unknown_layers(model):
        score, sums = (compiled.function.cost.flops / compiled.batch_size for compiled in (passes.score, passes.sums))
        print(
            f"gradients: warning: no fast per-example gradients for {', '.join(layers)}; by vmap(grad), in "
            f"microbatches of {passes.score.batch_size}, the norm of an example takes {score / sums:.1f} times the "
            "FLOPs of its gradient in a sum. Fast is a Layer with squared_grad_norms that is called through `tap`",
            file=sys.stderr,
        )
    sums = chunk_bytes(num_parameters(member.params), member.about.dataset.num_classes)
    require_memory_for_model("gradients", passes.functions, host_bytes=sums)
    return passes


def choose_examples(
    passes: GradientPasses, config: GradientsConfig, splits: Mapping[str, Split], trajectory: Trajectory
) -> Rows:
    """Return the positions of the training examples to analyze: all, or evenly spaced ones of a costly network.

    Print a line with their number and about how long they take, from the time of one batch.
    """
    num_train, num_epochs = len(splits["train"]), len(trajectory.params)
    num_others = sum(map(len, splits.values())) - num_train
    count = num_train if config.examples == "all" else affordable_examples(passes, num_epochs, num_train, num_others)

    # The time of a batch, of whichever examples, scaled by static costs
    score, test = passes.score, splits["test"]
    params, some = trajectory.params[trajectory.scored], np.resize(np.arange(len(test)), score.batch_size)
    for _ in range(3):  # the first call is slower
        score.function(params, test.images[some], test.labels[some])
    batches = analysis_flops(passes, num_epochs, count, num_others) / (score.batch_size * score.work or np.nan)
    seconds = score.function.calls.steady * batches if score.function.calls else np.nan

    message = f"gradients: {count + num_others:,} examples x {num_epochs} kept epochs"
    if count < num_train:
        message += f", {count:,} of {num_train:,} in training (all with gradients.examples: all)"
    if np.isfinite(seconds):
        message += f": about {seconds:,.0f} s"
    print(message, file=sys.stderr, flush=True)
    return slice(None) if count == num_train else np.arange(count, dtype=np.int64) * num_train // count
