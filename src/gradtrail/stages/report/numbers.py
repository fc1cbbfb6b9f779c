"""The numbers of the report: what it reads from the outputs of the stages before it, and what follows from that.

Which stages those are is read from `dvc.yaml`. DVC does not accept that file as a dep, but the outputs that it names
are deps: one stage more, or another output, runs the report again. A missing or damaged file is one line.
"""

import math
import struct
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from gradtrail.core import names
from gradtrail.core.data import Split
from gradtrail.stages.common.files import read_json
from gradtrail.stages.common.params import active_params, flatten
from gradtrail.stages.common.pipeline_file import read_pipeline, stages_before
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.data.changes import read_trained
from gradtrail.stages.data.data_files import DatasetInfo, read_info
from gradtrail.stages.data.parquet import read_parquet, with_class_names
from gradtrail.stages.dp.guarantee import PrivacyGuarantee, read_guarantee
from gradtrail.support.errors import UserError

Row: TypeAlias = dict[Hashable, Any]  # column → value

_PREDICTIONS = ("example_id", "label", "predicted", "probability")
_SCORES = ("split", "example_id", "predicted", "probability", "grad_norm", "suspicion")

_SERVED = (  # metrics that `evaluate` also has with the prefix `ensemble_`, if there are several members
    *("accuracy", "accuracy_low", "accuracy_high", "loss", "temperature"),
    *("expected_calibration_error", "expected_calibration_error_uncalibrated"),
)
_NAMES = dict.fromkeys(("class", "label", "predicted"), str)  # columns whose values may look like numbers or NaN
_LARGEST_MATRIX = 30  # classes; a larger confusion matrix is a figure
_SHADES = 9  # of the cells of the confusion matrix

_IN_MODEL_NAME = {"model", "hidden", "channels"}
_NOT_SHOWN = {"keep_epochs", "secret_sha256", "sha256", "sampling"}
_SWITCHES = {"augmentation", "changes", "privacy"}  # blocks whose params are shown if they are not 0, false or null
_OFF = {
    "normalization": None,  # params that are shown only if they have another value
    "class_weights": None,
    "dropout": 0.0,
    "members": 1,
    "vary": ["initialization", "order", "augmentation", "dropout"],
    "accumulation_steps": 1,
    "augmentation_multiplicity": 1,
    "shards": 1,
    "average_decay": None,
    "patience": None,
    "remat": False,
    "label_noise": 0,
    "corrections": False,
}


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The inputs of the report; tables and figures are read when the page shows them."""

    folder: Path  # the working folder
    info: DatasetInfo
    params: dict[str, Any]  # section → key → value
    metrics: dict[str, dict[str, Any]]  # stage → metric → value
    costs: dict[str, dict[str, Row]]  # stage → compiled function → static cost → value
    predictions: pd.DataFrame  # a row for each test example
    scores: pd.DataFrame  # gradient scores, a row for each example, or for each one of a sample
    splits: dict[str, Split]
    guarantee: PrivacyGuarantee | None  # None if the training is not private

    @property
    def is_redacted(self) -> bool:
        """Whether the outputs leave out everything that was computed from training examples without noise."""
        return self.guarantee is not None and self.guarantee.release

    @property
    def has_other_loss(self) -> bool:
        """Whether the training minimized another loss than the cross-entropy."""
        epochs = self.table("train/epochs")
        return any(not math.isclose(row["loss"], row["cross_entropy"], rel_tol=1e-5) for row in epochs)

    def table(self, name: str) -> list[Row]:
        """Return the rows of a CSV table, such as `evaluate/per_class`."""
        table = pd.read_csv(self._path(f"{name}.csv"), dtype=_NAMES, keep_default_na=False, na_values=[""])
        return table.to_dict("records")

    def figure(self, name: str) -> Row:
        """Return a PNG, such as `train/steps`, with its width and height in pixels."""
        data = self._path(f"{name}.png").read_bytes()
        width, height = struct.unpack_from(">II", data, 16)  # behind the signature and the head of the first chunk
        return {"data": data, "width": width, "height": height}

    def has_figure(self, name: str) -> bool:
        """Whether a stage drew a figure that it does not always draw."""
        return (self.folder / "results" / f"{name}.png").exists()

    def text(self, name: str) -> str:
        """Return the text of a file, such as `gradients/summary.md`."""
        return self._path(name).read_text(encoding="utf-8")

    def _path(self, name: str) -> Path:
        path = self.folder / "results" / name
        _require(path)
        return path


def read_sources(folder: Path) -> Sources:
    """Read the inputs of the report from a working folder.

    Raises:
        UserError: a file is missing or damaged, or stages used different data sets.
    """
    stages = stages_before("report", read_pipeline(folder / "dvc.yaml"))
    paths = sorted({path for spec in stages.values() for path in (*spec.data_deps, *spec.outs)})
    for path in paths:
        _require(folder / path)

    def read_all(kind: str) -> dict[str, Any]:
        files = {stage: f"results/{kind}/{stage}.json" for stage in stages}
        return {stage: read_json(folder / file) for stage, file in files.items() if file in paths}

    info, metrics = read_info(folder / "data/processed"), read_all("metrics")
    for stage, values in metrics.items():
        remaining = folder / f"results/{stage}/other_metrics.json"
        values.update(read_json(remaining) if remaining.exists() else {})
        if not info.digest.startswith(values.get("dataset_digest", "")):
            raise UserError(
                f"results/metrics/{stage}.json: of another data set than data/processed, which is {info.label}; "
                "run `dvc repro`"
            )

    return Sources(
        folder=folder,
        info=info,
        params=read_yaml(folder / "params.yaml"),
        metrics=metrics,
        costs=read_all("costs"),
        predictions=read_parquet(folder / "results/evaluate/predictions.parquet", _PREDICTIONS),
        scores=read_parquet(folder / "results/gradients/scores.parquet", _SCORES),
        splits=read_trained(folder / "data/processed", folder / "results/train"),
        guarantee=read_guarantee(folder / "results/train"),
    )


def compute_numbers(sources: Sources) -> dict[str, Any]:
    """Return the numbers of the page that no file has as they are, by their names in the templates."""
    params, evaluated = sources.params, sources.metrics["evaluate"]
    members = evaluated.get("members", 1)
    prefix = "ensemble_" if members > 1 else ""
    bins = sources.table("evaluate/calibration")
    classes = [row for row in sources.table("gradients/classes") if math.isfinite(row["share"])]
    num_predictions = max(1, sum(row["count"] for row in bins))
    return {
        "model": model_name(params),
        "members": members,
        "served": {key: evaluated[prefix + key] for key in _SERVED},  # metrics of the network or of the ensemble
        "mean_confidence": sum(row["count"] * row["confidence"] for row in bins) / num_predictions,
        "class_shares": sorted(classes, key=lambda row: row["share"]),  # without classes that have no training example
        "confusions": confusions(sources.predictions, sources.info.classes),
        "matrix": confusion_matrix(
            sources.predictions, sources.info.num_classes, by_share="balanced_accuracy" in evaluated
        ),
        "changed_labels": round(params["preprocess"]["label_noise"] * sources.metrics["preprocess"]["train_examples"]),
        "params_in_force": params_in_force(params),
        "variants": [row | {"work": flops(row)} for row in sources.table("profile/costs")],
    }


def model_name(params: dict[str, Any]) -> str:
    """Return the name of the model by its kind and widths, such as `mlp-256-128`."""
    train = params["train"]
    block = train.get(train["model"]) or {}
    widths = {key: block.get(key, ()) for key in ("channels", "hidden")}
    return names.model_name(block.get("file", train["model"]), **widths)


def params_in_force(params: dict[str, Any]) -> dict[str, Any]:
    """Return the params that had an effect on the training, by name, without switches that are off.

    An ambiguous name begins with that of its block.
    """
    train = params["train"]
    kinds = [train[name] for name in ("model", "optimizer", "schedule", "loss")]
    data = {f"preprocess.{name}": params["preprocess"][name] for name in ("label_noise", "corrections")}
    in_force: dict[str, Any] = {}
    for key, value in active_params(flatten({"train": train}) | data).items():
        _, *blocks, name = key.split(".")
        is_off = (not value and not _SWITCHES.isdisjoint(blocks)) or (name in _OFF and value == _OFF[name])
        if is_off or name in _IN_MODEL_NAME | _NOT_SHOWN:
            continue
        is_clear = not blocks or (blocks[0] in kinds and name not in in_force)
        in_force[name if is_clear else f"{blocks[0]}: {name}"] = value
    return {"model": model_name(params)} | {name.replace("_", " "): value for name, value in in_force.items()}


def confusions(predictions: pd.DataFrame, classes: Sequence[str]) -> list[Row]:
    """Return each pair of a label and another prediction with its number of examples, the most frequent pair first."""
    mistakes = predictions[predictions["label"] != predictions["predicted"]]
    sizes = mistakes.groupby(["label", "predicted"]).size().sort_values(ascending=False, kind="stable")
    return with_class_names(sizes.rename("number").reset_index(), classes).to_dict("records")


def confusion_matrix(predictions: pd.DataFrame, classes: int, *, by_share: bool = False) -> list[list[Row]]:
    """Return a row of cells for each label, shaded 0 to 9 by number or share of the label; none of too many classes."""
    if classes > _LARGEST_MATRIX:
        return []
    pairs = zip(predictions["label"].tolist(), predictions["predicted"].tolist(), strict=True)
    counts = Counter(pairs)
    sizes = predictions["label"].value_counts() if by_share else dict.fromkeys(range(classes), 1)
    most = max((number / sizes[pair[0]] for pair, number in counts.items() if pair[0] != pair[1]), default=1)

    def cell(label: int, predicted: int) -> Row:
        number = counts[label, predicted]
        shade = 0 if label == predicted else math.ceil(_SHADES * math.sqrt(number / sizes.get(label, 1) / most))
        return {"label": label, "predicted": predicted, "number": number, "shade": shade}

    return [[cell(label, predicted) for predicted in range(classes)] for label in range(classes)]


def flops(cost: Row, examples: int = 1) -> str:
    """Write the FLOPs of a compiled function per example: 1.05 MFLOP, or "at most" if its loops depend on the data."""
    bound = "at most " if cost["data_dependent_loops"] > 0 else ""
    return bound + _scaled(cost["flops"] / examples, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def size(number: float) -> str:
    """Write a number of bytes: 5449580 → 5.20 MiB."""
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    if number < step:
        return f"{number:.0f} {units[0]}"
    power = 0
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / step, power + 1
    return f"{number:#.3g}".rstrip(".") + f" {units[power]}"


def _require(path: Path) -> None:
    if not path.exists():
        raise UserError(f"{path}: no such file; `dvc repro` makes it")
