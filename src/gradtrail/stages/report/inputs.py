"""The inputs of the report, from the outputs of the stages before it; a missing or damaged file is one line.

Which stages those are is read from `dvc.yaml`. DVC does not accept that file as a dep, but the outputs that it names
are deps: one stage more, or another output, runs the report again.
"""

import csv
import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from gradtrail.core.data import Split
from gradtrail.stages.artifacts.parquet import read_parquet
from gradtrail.stages.artifacts.privacy import PrivacyGuarantee, read_guarantee
from gradtrail.stages.artifacts.splits import read_samples
from gradtrail.stages.common.dataset import DatasetInfo, read_info
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.files import read_mapping
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import StageSpec, read_pipeline, stages_before
from gradtrail.support.errors import UserError, one_line

Found = TypeVar("Found")

_PREDICTIONS = ("example_id", "label", "predicted", "probability")
_SCORES = ("split", "example_id", "label", "true_label", "predicted", "probability", "grad_norm", "suspicion")
_PNG_SIZE_OFFSET = 16  # bytes: the signature, then length and type of the first chunk


@dataclass(frozen=True, kw_only=True)
class Png:
    """A PNG file: its bytes, and its width and height in pixels."""

    data: bytes
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class CsvTable:
    """A CSV table of a stage, its values as text."""

    rows: list[dict[str, str]]  # column → value, for each row

    def text(self, column: str) -> list[str]:
        """Return a column."""
        return [row[column] for row in self.rows]

    def numbers(self, column: str) -> list[float]:
        """Return a column as numbers, which may be infinite."""
        return [float(value) for value in self.text(column)]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The inputs of the report."""

    info: DatasetInfo  # description of the data set, with the number of examples in each split
    params: dict[str, Any]  # section → key → value, as in `params.yaml`
    versions: dict[str, Any]  # package → version
    metrics: dict[str, dict[str, Any]]  # stage → metric → value
    costs: dict[str, dict[str, Any]]  # stage → compiled function → static cost → value
    tables: dict[str, CsvTable]  # `stage/name` → table
    figures: dict[str, Png]  # `stage/name` → figure
    predictions: pd.DataFrame  # a row for each test example
    scores: pd.DataFrame  # gradient scores, a row for each example of all splits
    splits: dict[str, Split]  # split → its examples
    summary: str  # summary of the gradient analysis, in Markdown
    stages: dict[str, StageSpec]  # the stages that the report depends on, as `dvc.yaml` declares them
    digests: dict[str, str]  # path of each file or folder that a stage reads or writes → digest, as in `dvc.lock`
    guarantee: PrivacyGuarantee | None  # guarantee of a private training; else None

    def metric(self, stage: str, key: str) -> float:
        """Return a metric of a stage."""
        value: float = self.metrics[stage][key]
        return value

    def cost(self, stage: str, function: str, key: str) -> float:
        """Return a static cost of a function."""
        value: float = self.costs[stage][function][key]
        return value

    def param(self, key: str) -> Any:
        """Return the value of a dotted key of `params.yaml`; raise UserError if there is none."""
        try:
            return functools.reduce(lambda node, part: node[part], key.split("."), self.params)
        except (KeyError, TypeError, IndexError):
            raise UserError(f"params.yaml: {key} is missing") from None

    def table(self, name: str) -> CsvTable:
        """Return a table, such as `evaluate/per_class`."""
        return _named(self.tables, name, "csv")

    def figure(self, name: str) -> Png:
        """Return a figure, such as `evaluate/confusion`."""
        return _named(self.figures, name, "png")


def read_sources(folder: Path) -> Sources:
    """Read the inputs of the report from a working folder.

    Raises:
        UserError: a file is missing or damaged, or stages used different data sets.
    """
    stages = stages_before("report", read_pipeline(folder / "dvc.yaml"))
    info = read_info(folder / "data" / "processed")
    files = {stage: sorted((folder / "results" / stage).glob("*")) for stage in stages}
    return Sources(
        info=info,
        params=read_yaml(folder / "params.yaml"),
        versions=read_yaml(folder / "pipeline/versions.yaml"),
        metrics={
            stage: _read_metrics(folder / file, info)
            for stage, spec in stages.items()
            if (file := f"results/metrics/{stage}.json") in spec.outs
        },
        costs={
            stage: read_mapping(folder / file, "costs")
            for stage, spec in stages.items()
            if (file := f"results/costs/{stage}.json") in spec.outs
        },
        tables={_name(path): read_table(path) for paths in files.values() for path in paths if path.suffix == ".csv"},
        figures={_name(path): read_png(path) for paths in files.values() for path in paths if path.suffix == ".png"},
        predictions=read_parquet(folder / "results" / "evaluate" / "predictions.parquet", _PREDICTIONS),
        scores=read_parquet(folder / "results" / "gradients" / "scores.parquet", _SCORES),
        splits=read_samples(folder / "data" / "processed", info),
        summary=_read_text(folder / "results" / "gradients" / "summary.md"),
        stages=stages,
        digests=_digests_of(stages, folder),
        guarantee=read_guarantee(folder / "results" / "train"),
    )


def read_table(path: Path) -> CsvTable:
    """Read a CSV table with a header."""
    return CsvTable(rows=list(csv.DictReader(_read_text(path).splitlines())))


def read_png(path: Path) -> Png:
    """Read a PNG and its size."""
    data = path.read_bytes()
    width, height = struct.unpack_from(">II", data, _PNG_SIZE_OFFSET)
    return Png(data=data, width=width, height=height)


def _read_metrics(path: Path, info: DatasetInfo) -> dict[str, Any]:
    """Read a metrics file; raise UserError if it is damaged, or of another data set than `data/processed`."""
    content = read_mapping(path, "metrics")
    if not info.digest.startswith(str(content.get("dataset_digest", ""))):
        raise UserError(f"{path}: of another data set than data/processed, which is {info.label}; run `dvc repro`")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `dvc repro` makes it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as text: {one_line(error)}") from None


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def _named(items: Mapping[str, Found], name: str, suffix: str) -> Found:
    if name not in items:
        raise UserError(f"results/{name}.{suffix}: no such file; `dvc repro` makes it")
    return items[name]


def _digests_of(stages: Mapping[str, StageSpec], folder: Path) -> dict[str, str]:
    paths = sorted({path for spec in stages.values() for path in (*spec.data_deps, *spec.outs)})
    for path in paths:
        if not (folder / path).exists():
            raise UserError(f"{folder / path}: no such file; `dvc repro` makes it")
    return {path: digest(folder / path) for path in paths}
