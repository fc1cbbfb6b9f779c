"""The inputs of the gradient analysis: examples, kept weights, learning rates and learning dynamics."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np
import pandas as pd

from gradtrail.core.data import Split
from gradtrail.core.gradients.analysis import (
    GradientsConfig,
    Trajectory,
    affordable_examples,
    analysis_flops,
    num_influenced,
)
from gradtrail.core.gradients.chunks import chunk_bytes
from gradtrail.core.gradients.exact import compile_exact, sample_size
from gradtrail.core.gradients.passes import GradientPasses, compile_passes
from gradtrail.core.nn.models import HostParams, Model, Params, WeightsKind, num_parameters
from gradtrail.core.per_example import unknown_layers
from gradtrail.core.sharding import make_mesh
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.stages.artifacts.data_files import DatasetInfo, sample_rows
from gradtrail.stages.artifacts.members import read_folders
from gradtrail.stages.artifacts.parquet import read_parquet
from gradtrail.stages.artifacts.privacy import PrivacyGuarantee, read_guarantee
from gradtrail.stages.artifacts.weights import WeightsInfo, read_weights, require_same_data
from gradtrail.support.errors import UserError
from gradtrail.support.memory import require_memory_for_model

Rows: TypeAlias = np.ndarray | slice  # positions of examples
DYNAMICS = ("example_id", "forgetting_events", "first_correct_epoch", "mean_probability", "probability_std")


@dataclass(frozen=True, kw_only=True)
class MemberInputs:
    """The inputs of the analysis from the training of one member."""

    seed: int
    name: str  # name in messages; empty for a single member
    model: Model
    about: WeightsInfo  # metadata of the weights to score
    trajectory: Trajectory
    dynamics: Mapping[str, np.ndarray]  # learning dynamics of each training example, in the order of the split

    @property
    def weights(self) -> Params | HostParams:
        """Parameters of the scored epoch."""
        return self.trajectory.params[self.trajectory.scored]

    def dynamics_of(self, rows: Rows) -> dict[str, np.ndarray]:
        """Return the learning dynamics of the training examples at these positions."""
        return {name: values[rows] for name, values in self.dynamics.items()}


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
        UserError: one line; a file is missing or damaged, or of another model or data set, or the members differ in
            their model.
    """
    result_folders, first, guarantee = read_folders(results, models), None, read_guarantee(results)
    for seed, folder in read_folders(models, models).items():
        model, about, params = read_kept_weights(folder, scored, dataset)
        if first and model.config != first.config:
            raise UserError(f"{folder}: weights of {model.config.name}, but the first member is {first.config.name}")
        first = first or model
        yield MemberInputs(
            seed=seed,
            name=f"seed {seed}" if len(result_folders) > 1 else "",
            model=model,
            about=about,
            trajectory=read_trajectory(result_folders[seed], params, about.epoch, guarantee),
            dynamics=read_dynamics(result_folders[seed], train),
        )


def read_kept_weights(
    models: Path, scored: WeightsKind, dataset: DatasetInfo
) -> tuple[Model, WeightsInfo, dict[int, Params]]:
    """Read the weights to score, with their model and metadata, and those of all kept epochs, as epoch → parameters."""
    path = models / f"{scored}.safetensors"
    model, params, about = read_weights(path)
    require_same_data(path, about, dataset)
    by_epoch: dict[int, Params] = {}
    for path in sorted((models / "epochs").glob("*.safetensors")):
        other, kept_params, kept_about = read_weights(path)
        if other.config != model.config:
            raise UserError(
                f"{path}: weights of {other.config.name}, but {scored}.safetensors holds {model.config.name}"
            )
        require_same_data(path, kept_about, dataset)
        by_epoch[kept_about.epoch] = kept_params
    return model, about, by_epoch | {about.epoch: params}


def read_trajectory(
    results: Path, params: Mapping[int, Params], scored: int, guarantee: PrivacyGuarantee | None
) -> Trajectory:
    """Read the learning rate of every step of a training, and its batch size, the mean one of a private training."""
    epochs, path = len(pd.read_csv(results / "epochs.csv")), results / "steps.parquet"
    steps = read_parquet(path, ("num_examples", "learning_rate"))
    if not epochs or not len(steps) or len(steps) % epochs:
        raise UserError(f"{path}: {len(steps)} steps cannot be divided evenly among {epochs} epochs")
    return Trajectory(
        params=params,
        scored=scored,
        learning_rates=steps["learning_rate"].to_numpy(),
        steps_per_epoch=len(steps) // epochs,
        batch_size=guarantee.batch_size if guarantee else int(steps["num_examples"].max()),
    )


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


def compile_all(
    member: MemberInputs, splits: Mapping[str, Split], config: GradientsConfig, *, compiler: Compiler
) -> tuple[GradientPasses, CompiledFunction]:
    """Compile the passes and the float64 scores, and require the memory that they need.

    Layers whose per-example gradients have no fast implementation cost a warning of one line.
    """
    if names := unknown_layers(member.model):
        print(
            f"gradients: warning: no fast per-example gradients for {', '.join(names)}; falling back to vmap(grad), "
            "which is slow",
            file=sys.stderr,
        )
    passes = compile_passes(
        member.model,
        member.about.label_smoothing,
        num_influenced(config, len(splits["test"])),
        compiler=compiler,
        mesh=make_mesh(jax.local_devices()[:1]),
    )
    exact = compile_exact(member.model, member.about.label_smoothing, sample_size(splits), compiler=compiler)
    sums = chunk_bytes(num_parameters(member.weights), member.about.dataset.num_classes)
    require_memory_for_model("gradients", [*passes.functions, exact], host_bytes=sums)
    return passes, exact


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
    params, some = passes.place(trajectory.params[trajectory.scored]), np.resize(np.arange(len(test)), score.batch_size)
    for _ in range(3):  # the first call is slower
        score.function(params, (test.images[some], test.labels[some]))
    batches = analysis_flops(passes, num_epochs, count, num_others) / (score.batch_size * score.work or np.nan)
    seconds = score.function.calls.steady * batches if score.function.calls else np.nan

    message = f"gradients: {count + num_others:,} examples x {num_epochs} kept epochs"
    if count < num_train:
        message += f", {count:,} of {num_train:,} in training (all with gradients.examples: all)"
    if np.isfinite(seconds):
        message += f": about {seconds:,.0f} s"
    print(message, file=sys.stderr, flush=True)
    return slice(None) if count == num_train else np.arange(count, dtype=np.int64) * num_train // count
