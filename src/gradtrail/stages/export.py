"""Exported models: the folder that `artifacts/exported` reads, and the metrics of an export."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pandas as pd
from jaxtyping import Array, Float
from safetensors.numpy import save

from gradtrail.core.batching import join, map_batches
from gradtrail.core.data import Split
from gradtrail.core.evaluate import share_metrics
from gradtrail.core.export import ExportConfig, Platform, export_forward, tensors
from gradtrail.core.nn.models import HostParams, Model, Params, WeightsKind
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.stages.common.files import write_json
from gradtrail.stages.data.data_files import DatasetInfo
from gradtrail.stages.data.parquet import read_parquet
from gradtrail.stages.model.calibration import Evaluated
from gradtrail.stages.model.exported import (
    FORMAT,
    MANIFEST,
    WEIGHTS_FILE,
    ExportedModel,
    Manifest,
    export_name,
    program_name,
)
from gradtrail.stages.model.weights import read_members
from gradtrail.support.errors import UserError

COMPARED = ("size_bytes", "worst_class_recall")  # metrics that people compare
_PACKAGES = ("flax", "jax", "jaxlib")  # packages whose versions are recorded

Probabilities = Float[np.ndarray, "examples classes"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network to export, or an ensemble of several."""

    model: Model
    members: Mapping[int, Params | HostParams]  # parameters of each member, by seed
    weights: WeightsKind
    epochs: tuple[int, ...]  # epochs of training behind the weights of each member
    dataset: str  # data set of the training, such as `mnist 1234abcd`
    classes: tuple[str, ...]  # name of the class of each output
    temperature: float  # temperature of the probabilities
    validation_images: int  # to which it was fitted


def read_network(evaluated: Evaluated, dataset: DatasetInfo) -> Network:
    """Read the networks that were evaluated; raise UserError if a file belongs to another data set."""
    seeds, models, params, infos = zip(*read_members(evaluated.weights, dataset), strict=True)
    return Network(
        model=models[0],
        members=dict(zip(seeds, params, strict=True)),
        weights=evaluated.kind,
        epochs=tuple(info.epoch for info in infos),
        dataset=dataset.label,
        classes=dataset.classes,
        temperature=evaluated.temperature,
        validation_images=dataset.examples["validation"],
    )


def write_export(folder: Path, network: Network, config: ExportConfig) -> None:
    """Write an exported model to a new folder: the same bytes for the same network and versions, in any place."""
    leaves = tensors([*network.members.values()], network.temperature)
    models = {"": network.model} | {
        precision: Model(dataclasses.replace(network.model.config, precision=precision))
        for precision in config.precisions
    }
    programs = {
        program_name(platform, precision): export_forward(model, leaves, len(network.members), platform)
        for precision, model in models.items()
        for platform in get_args(Platform)
    }
    contents = {WEIGHTS_FILE: save(leaves), **{name: bytes(program.serialize()) for name, program in programs.items()}}
    (calling_convention,) = {program.calling_convention_version for program in programs.values()}
    manifest = Manifest(
        format=FORMAT,
        name=export_name(config.name, network.dataset),
        model=network.model.config.name,
        weights=network.weights,
        seeds=tuple(network.members),
        epochs=network.epochs,
        dataset=network.dataset,
        image_shape=network.model.config.image_shape,
        classes=network.classes,
        temperature=network.temperature,
        validation_images=network.validation_images,
        batch_sizes=config.batch_sizes,
        versions={name: version(name) for name in _PACKAGES},
        calling_convention=calling_convention,
        files={name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    )
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    write_json(folder / MANIFEST, dataclasses.asdict(manifest))


def compile_largest(exported: ExportedModel, *, compiler: Compiler) -> CompiledFunction:
    """Compile the exported program for the largest batch size of its manifest: tensors, images → probabilities."""
    shape = (exported.manifest.batch_sizes[-1], *exported.manifest.image_shape)
    return compiler.compile("forward", exported.program, exported.tensors, jax.ShapeDtypeStruct(shape, np.uint8))


def answers(exported: ExportedModel, forward: Callable[..., Any], split: Split) -> Probabilities:
    """Return the probabilities of a split by the exported program; `forward` is compiled for the largest batch size."""

    def answer_batch(images: np.ndarray) -> dict[str, Array]:
        return {"probabilities": forward(exported.tensors, images)}

    return join(map_batches(answer_batch, exported.manifest.batch_sizes[-1], split.images))["probabilities"]


def read_evaluation(results: Path, split: Split, num_classes: int) -> pd.DataFrame:
    """Read the predictions of `evaluate`; raise UserError, one line, if they are of other examples."""
    path = results / "predictions.parquet"
    table = read_parquet(path, ["example_id", "label", "predicted", *_columns(num_classes)])
    if not np.array_equal(table["example_id"], split.example_id) or not np.array_equal(table["label"], split.labels):
        raise UserError(f"{path}: belongs to another test split than data/processed; run `dvc repro evaluate`")
    return table


def measure(
    folder: Path, evaluated: Evaluated, evaluation: pd.DataFrame, probabilities: Probabilities
) -> dict[str, Any]:
    """Return flat metrics of an export.

    The size of the folder in bytes; the accuracy and the worst class's recall on the test split with Wilson's 95 %
    intervals, and the calibration error with its interval, from `evaluate`; and the largest difference between the
    export's answers and those.

    Args:
        folder: folder of the export.
        evaluation: the predictions of `evaluate`.
        probabilities: the probabilities of the same examples by the exported program.
    """
    error, num_classes = evaluated.calibration_error, probabilities.shape[1]
    labels, predicted = evaluation["label"].to_numpy(), evaluation["predicted"].to_numpy()
    is_correct = predicted == labels
    worst = min(np.unique(labels), key=lambda label: float(is_correct[labels == label].mean()))
    return {
        **share_metrics("accuracy", is_correct),
        "worst_class": int(worst),
        **share_metrics("worst_class_recall", is_correct[labels == worst]),
        "expected_calibration_error": error.value,
        "expected_calibration_error_low": error.low,
        "expected_calibration_error_high": error.high,
        "largest_difference": float(np.max(np.abs(probabilities - evaluation[_columns(num_classes)].to_numpy()))),
        "num_other_labels": int(np.sum(probabilities.argmax(axis=1) != predicted)),
        "num_examples": len(evaluation),
        "size_bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }


def _columns(num_classes: int) -> list[str]:
    return [f"probability_{label}" for label in range(num_classes)]
