"""Metrics of an export: its size, its evaluation, and the difference between its answers and the evaluated ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from jaxtyping import Array, Float

from gradtrail.core.common.batching import join, map_batches
from gradtrail.core.common.intervals import share_interval
from gradtrail.core.common.split import Split
from gradtrail.core.export.forward import TEMPERATURE
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.stages.artifacts.calibration import Evaluated
from gradtrail.stages.artifacts.exported import ExportedModel
from gradtrail.stages.artifacts.parquet import read_parquet
from gradtrail.support.errors import UserError

_PREDICTIONS = Path("predictions.parquet")

Probabilities = Float[np.ndarray, "examples classes"]


def compile_largest(exported: ExportedModel, *, compiler: Compiler) -> CompiledFunction:
    """Compile the exported program for the largest batch size of its manifest: tensors, images → probabilities."""
    shape = (exported.manifest.batch_sizes[-1], *exported.manifest.image_shape)
    return compiler.compile("forward", exported.program, exported.tensors, jax.ShapeDtypeStruct(shape, np.uint8))


def answers(exported: ExportedModel, forward: Callable[..., Any], split: Split) -> Probabilities:
    """Return the probabilities of a split by the exported program; `forward` is compiled for the largest batch size."""

    def answer_batch(images: np.ndarray) -> dict[str, Array]:
        return {"probabilities": forward(exported.tensors, images)}

    return join(list(map_batches(answer_batch, exported.manifest.batch_sizes[-1], split.images)))["probabilities"]


def read_evaluation(results: Path, split: Split, num_classes: int) -> pd.DataFrame:
    """Read the predictions of `evaluate`; raise UserError, one line, if they are damaged or of other examples."""
    path = results / _PREDICTIONS
    columns = ["example_id", "label", "predicted", *_columns(num_classes)]
    table = read_parquet(path, columns)
    if not np.array_equal(table["example_id"], split.example_id) or not np.array_equal(table["label"], split.labels):
        raise UserError(f"{path}: belongs to another test split than data/processed; run `dvc repro evaluate`")
    return table


def measure(
    exported: ExportedModel, folder: Path, evaluated: Evaluated, evaluation: pd.DataFrame, probabilities: Probabilities
) -> dict[str, Any]:
    """Return flat metrics of an export.

    Sizes in bytes, numbers of parameters and classes, the temperature; the accuracy and the worst class's recall on the
    test split with Wilson's 95 % intervals, and the calibration error with its interval, from `evaluate`; and the
    largest difference between the export's answers and those.

    Args:
        exported: the model.
        folder: folder of the export.
        evaluated: the evaluated weights and their calibration.
        evaluation: the predictions of `evaluate`.
        probabilities: the probabilities of the same examples by the exported program.
    """
    sizes = {f"{path.stem.replace('.', '_')}_bytes": path.stat().st_size for path in sorted(folder.iterdir())}
    error = evaluated.calibration_error
    difference = np.abs(probabilities - evaluation[_columns(probabilities.shape[1])].to_numpy())
    return {
        **_share("accuracy", np.asarray(evaluation["predicted"] == evaluation["label"])),
        **_worst_class(evaluation),
        "expected_calibration_error": error.value,
        "expected_calibration_error_low": error.low,
        "expected_calibration_error_high": error.high,
        "largest_difference": float(np.max(difference)),
        "num_other_labels": int(np.sum(probabilities.argmax(axis=1) != evaluation["predicted"])),
        "num_examples": len(evaluation),
        "num_classes": probabilities.shape[1],
        "num_networks": len(exported.manifest.seeds),
        "num_parameters": sum(tensor.size for name, tensor in exported.tensors.items() if name != TEMPERATURE),
        "temperature": evaluated.temperature,
        "size_bytes": sum(sizes.values()),
        **sizes,
    }


def _worst_class(evaluation: pd.DataFrame) -> dict[str, float]:
    """Return the class with the lowest recall in the split, the first of equal ones, and its recall."""
    labels, is_correct = evaluation["label"].to_numpy(), np.asarray(evaluation["predicted"] == evaluation["label"])
    worst = min(np.unique(labels), key=lambda label: float(is_correct[labels == label].mean()))
    return {"worst_class": int(worst), **_share("worst_class_recall", is_correct[labels == worst])}


def _share(name: str, is_correct: np.ndarray) -> dict[str, float]:
    """Return a share with Wilson's 95 % interval."""
    interval = share_interval(int(is_correct.sum()), len(is_correct))
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _columns(num_classes: int) -> list[str]:
    return [f"probability_{label}" for label in range(num_classes)]
