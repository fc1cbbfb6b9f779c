"""A training whose export is judged or released: its logged model, its evaluation and its predictions."""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus, Run

from gradtrail.serving.registry import Reference, resolve
from gradtrail.stages.artifacts.exported import Manifest, read_manifest
from gradtrail.stages.common.dvc_cache import restore
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError, one_line
from gradtrail.tracking.artifacts import download
from gradtrail.tracking.lookup import find_run
from gradtrail.tracking.models import EXPORT_DIGEST, models_of
from gradtrail.tracking.runs import PARENT, RunIndex
from gradtrail.tracking.tags import outputs

_RESULTS = "results/evaluate"  # output of the stage; its small files are artifacts in `results`
_TABLE, _CLASSES, _MEMBERS = "predictions.parquet", "classes.csv", "members.csv"


@dataclass(frozen=True)
class Predictions:
    """The predictions of a model for the test split.

    Attributes:
        table: A row for each example, in the order of the split: `label` and `predicted`; also `example_id`, `loss`,
            `probability_0` and so on if they are known.
    """

    table: pd.DataFrame
    dataset: str  # name and digest of the data set

    def test_digest(self, *, by_id: bool) -> str:
        """Return the SHA-256 of data set and labels of the test split, with the examples' ids or in their order."""
        columns = ["example_id", "label"] if by_id else ["label"]
        content = self._sorted(by_id=by_id)[columns].to_numpy(np.int64).tobytes()
        return hashlib.sha256(self.dataset.encode() + b"\0" + content).hexdigest()

    def paired_with(self, other: "Predictions") -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return the labels, this model's predictions and the other's, for the same examples.

        Examples are joined by their ids, or by their order if a table has no ids. None if the test splits differ.
        """
        by_id = "example_id" in self.table and "example_id" in other.table
        if self.test_digest(by_id=by_id) != other.test_digest(by_id=by_id):
            return None
        first, second = (predictions._sorted(by_id=by_id) for predictions in (self, other))
        return first["label"].to_numpy(), first["predicted"].to_numpy(), second["predicted"].to_numpy()

    def _sorted(self, *, by_id: bool) -> pd.DataFrame:
        return self.table.sort_values("example_id") if by_id else self.table


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An exported training."""

    run: Run
    model_id: str  # id of its logged model
    digest: str  # digest of the export
    client: MlflowClient
    index: RunIndex  # index of all runs

    @property
    def name(self) -> str:
        """Name and short id of the run, for messages."""
        return f"{self.run.info.run_name} {self.run.info.run_id[:8]}"

    @cached_property
    def export(self) -> Reference:
        """The export on this machine; UserError if it cannot be downloaded or is damaged."""
        return resolve(f"models:/{self.model_id}")

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the export."""
        return read_manifest(self.export.folder)

    @cached_property
    def evaluation(self) -> Run | None:
        """The newest evaluation of the exported weights."""
        evaluations = (run for run in self._children("evaluate") if _evaluates(run, self.manifest.weights))
        return next(evaluations, None)

    @cached_property
    def export_metrics(self) -> dict[str, float]:
        """The metrics of the stage `export`; empty if it has no run."""
        run = next(self._children("export"), None)
        return run.data.metrics if run else {}

    @cached_property
    def predictions(self) -> Predictions | None:
        """The predictions of the evaluation; None if neither the store nor DVC's cache has them.

        The full table is in the store with `runtime.copy_outs`, and else in DVC's cache. If that is on another machine,
        the store's small table of labels and predictions replaces it.
        """
        if (run := self.evaluation) is None:
            return None
        dataset = " ".join(run.data.tags.get(tag, "") for tag in ("dataset", "dataset_digest"))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            path = self._artifact(run, f"results/{_TABLE}", folder) or _restore_table(run, folder)
            path = path or self._artifact(run, f"results/{_CLASSES}", folder)
            return Predictions(_read_table(path), dataset) if path else None

    @cached_property
    def accuracies(self) -> dict[int, float]:
        """Accuracy of each member on the test split, by its seed; one entry for a single network."""
        if (run := self.evaluation) is None:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            path = self._artifact(run, f"results/{_MEMBERS}", Path(folder))
            if path is None:
                accuracy = run.data.metrics.get("eval/accuracy")
                return {self.manifest.seeds[0]: accuracy} if accuracy is not None else {}
            table = _read_table(path, ("seed", "accuracy"))
        return dict(zip(table["seed"].astype(int), table["accuracy"].astype(float), strict=True))

    def _children(self, stage: str) -> Iterator[Run]:
        yield from self.index({"stage": stage, PARENT: self.run.info.run_id}, finished=True)

    def _artifact(self, run: Run, path: str, folder: Path) -> Path | None:
        return download(self.client, run.info.run_id, path, folder)


def find_candidate(name: str, client: MlflowClient) -> Candidate:
    """Return the exported training that a name refers to.

    Args:
        name: A name of a run, see `find_run`; a child run refers to its training.
        client: Client of the store.

    Raises:
        UserError: There is no such run, or no export of it; one line.
    """
    index = RunIndex(client)
    run = find_run(name, index.runs())
    if run.data.tags.get("stage") != TRAIN and (parent := run.data.tags.get(PARENT)) in index:
        run = index[str(parent)]
    return candidate_of(run, client, index)


def candidate_of(run: Run, client: MlflowClient, index: RunIndex, digest: str | None = None) -> Candidate:
    """Return the exported training of a run: its newest export, or the one with a digest."""
    ready = [model for model in models_of(client, run) if model.status == LoggedModelStatus.READY]
    ready = [model for model in ready if digest in (None, model.tags[EXPORT_DIGEST])]
    if not ready:
        name = f"{run.info.run_name} {run.info.run_id[:8]}"
        raise UserError(f"{name}: has no exported model; `dvc repro export` makes it")
    newest = max(ready, key=lambda model: model.creation_timestamp)
    return Candidate(run=run, model_id=newest.model_id, digest=newest.tags[EXPORT_DIGEST], client=client, index=index)


def _evaluates(run: Run, weights: str) -> bool:
    return run.data.params.get("evaluate.weights", weights) == weights


def _restore_table(run: Run, folder: Path) -> Path | None:
    """Return the table of predictions from DVC's cache or the working folder."""
    md5 = outputs(run.data.tags).get(_RESULTS)
    with contextlib.suppress(OSError, ValueError):
        if md5 and restore(_RESULTS, md5, folder, commit="") and (folder / _RESULTS / _TABLE).is_file():
            return folder / _RESULTS / _TABLE
    return None


def _read_table(path: Path, columns: tuple[str, ...] = ("label", "predicted")) -> pd.DataFrame:
    """Read a table that has these columns; raise UserError in one line if it is damaged."""
    try:
        is_parquet = path.suffix == ".parquet"  # the metadata of pandas may be damaged
        table = pq.read_table(path).to_pandas(ignore_metadata=True) if is_parquet else pd.read_csv(path)
        if missing := [name for name in columns if name not in table]:
            raise ValueError(f"no column {missing[0]}")
        if table.empty:
            raise ValueError("no rows")
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise UserError(f"{path.name} of the evaluation: damaged: {one_line(error)[:200]}") from None
    return table
