"""What the report shows, read from the outs of the stages before it; what is missing or damaged is one line.

Which stages those are is read from `dvc.yaml`. DVC does not accept that file as a dep, but the outs that it names are
deps: one stage more, or another out, runs the report again.
"""

import csv
import functools
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gradtrail.stages.common.dataset import DatasetInfo, read_info
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import StageSpec, read_pipeline, stages_before
from gradtrail.support.errors import UserError, one_line

Found = TypeVar("Found")
REPORT = "report"

_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"


@dataclass(frozen=True, kw_only=True)
class Png:
    """A picture: its bytes, its width and its height in pixels."""

    data: bytes
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class CsvTable:
    """A table of a stage; every value is text until a column is asked for as numbers.

    Attributes:
        path: for errors.
        rows: column → value.
    """

    path: Path
    rows: list[dict[str, str]]

    def text(self, column: str) -> list[str]:
        """Return a column; raise UserError where a row has none."""
        found = [row.get(column) for row in self.rows]
        if any(value is None for value in found):
            raise UserError(f"{self.path}: column {column} is missing or incomplete")
        return [value for value in found if value is not None]

    def numbers(self, column: str) -> list[float]:
        """Return a column as numbers, which may be infinite; raise UserError where a value is none."""
        try:
            return [float(value) for value in self.text(column)]
        except ValueError as error:
            raise UserError(f"{self.path}: column {column}: {one_line(error)}") from None


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Everything that the report shows.

    Attributes:
        info: which data set it is, with the number of examples in each split.
        params: section → key → value, as they stand in `params.yaml`.
        versions: package → version.
        metrics: stage → figure → value.
        tables: `stage/name` → table.
        pictures: `stage/name` → picture.
        summary: what the gradients say, in Markdown.
        stages: stage → what it reads and writes, as `dvc.yaml` declares it: of all stages that the report depends on.
        digests: path of each file or folder that a stage reads or writes → digest, as DVC has it.
    """

    info: DatasetInfo
    params: dict[str, Any]
    versions: dict[str, Any]
    metrics: dict[str, dict[str, Any]]
    tables: dict[str, CsvTable]
    pictures: dict[str, Png]
    summary: str
    stages: dict[str, StageSpec]
    digests: dict[str, str]

    def figure(self, stage: str, key: str) -> float:
        """Return a figure of a metrics file; raise UserError where it is missing or no finite number."""
        found = self.metrics[stage].get(key)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise UserError(f"metrics/{stage}.json: {key} should be a number, got {found!r}")
        return found

    def param(self, key: str) -> Any:
        """Return the value of a dotted key of `params.yaml`; raise UserError where there is none."""
        try:
            return functools.reduce(lambda node, part: node[part], key.split("."), self.params)
        except (KeyError, TypeError, IndexError):
            raise UserError(f"params.yaml: {key} is missing") from None

    def table(self, name: str) -> CsvTable:
        """Return a table, such as `evaluate/per_class`."""
        return _named(self.tables, name, "csv")

    def picture(self, name: str) -> Png:
        """Return a picture, such as `evaluate/confusion`."""
        return _named(self.pictures, name, "png")


def read_sources(folder: Path) -> Sources:
    """Read all that the report shows from a working folder.

    Raises:
        UserError: a file is missing or not of its kind, or stages worked on different data sets.
    """
    params = read_yaml(folder / "params.yaml")
    stages = stages_before(REPORT, read_pipeline(folder / "dvc.yaml"))
    info = read_info(folder / "data" / "processed")
    files = {stage: sorted((folder / "results" / stage).glob("*")) for stage in stages}
    return Sources(
        info=info,
        params={stage: _section(params, stage) for stage in stages},
        versions=read_yaml(folder / "versions.yaml"),
        metrics={stage: _read_metrics(folder / "metrics" / f"{stage}.json", info) for stage in stages},
        tables={_name(path): read_table(path) for paths in files.values() for path in paths if path.suffix == ".csv"},
        pictures={_name(path): read_png(path) for paths in files.values() for path in paths if path.suffix == ".png"},
        summary=_read_text(folder / "results" / "gradients" / "summary.md"),
        stages=stages,
        digests=_digests_of(stages, folder),
    )


def read_table(path: Path) -> CsvTable:
    """Read a table with a header; raise UserError where the file is none."""
    try:
        return CsvTable(path=path, rows=list(csv.DictReader(_read_text(path).splitlines(), strict=True)))
    except csv.Error as error:
        raise UserError(f"{path}: not readable as a table: {one_line(error)}") from None


def read_png(path: Path) -> Png:
    """Read a picture and its size; raise UserError where the file is no PNG."""
    data = path.read_bytes()
    if not data.startswith(_PNG) or len(data) < len(_PNG) + 8:
        raise UserError(f"{path}: no PNG; `dvc repro` makes it")
    width, height = struct.unpack_from(">II", data, len(_PNG))
    return Png(data=data, width=width, height=height)


def _read_metrics(path: Path, info: DatasetInfo) -> dict[str, Any]:
    """Read a metrics file; raise UserError where it is none, or of another data set than the data."""
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected figures by name, got {type(content).__name__}")
    if content.get("dataset_digest") != info.digest:
        raise UserError(f"{path}: of another data set than data/processed, which is {info.label}; `dvc repro` mends it")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `dvc repro` makes it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as text: {one_line(error)}") from None


def _section(params: Mapping[str, Any], stage: str) -> Any:
    if not isinstance(params.get(stage), dict):
        raise UserError(f"params.yaml: section '{stage}' is missing")
    return params[stage]


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def _named(found: Mapping[str, Found], name: str, suffix: str) -> Found:
    if name not in found:
        raise UserError(f"results/{name}.{suffix}: no such file; `dvc repro` makes it")
    return found[name]


def _digests_of(stages: Mapping[str, StageSpec], folder: Path) -> dict[str, str]:
    paths = sorted({path for spec in stages.values() for path in (*spec.data_deps, *spec.outs)})
    for path in paths:
        if not (folder / path).exists():
            raise UserError(f"{folder / path}: no such file; `dvc repro` makes it")
    return {path: digest(folder / path) for path in paths}
