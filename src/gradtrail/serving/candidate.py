"""An exported training that is judged or released: its export, its evaluation and its predictions."""

import io
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus, Run

from gradtrail.serving.registry import CHAMPION, MODELS, Reference, resolve, version_of
from gradtrail.stages.artifacts.exported import Manifest, read_manifest
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError
from gradtrail.tracking.artifacts import read_artifact
from gradtrail.tracking.lookup import find_run
from gradtrail.tracking.models import models_of
from gradtrail.tracking.runs import PARENT, RunIndex


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An exported training."""

    run: Run
    export: Reference
    client: MlflowClient
    index: RunIndex  # index of all runs

    @property
    def name(self) -> str:
        """Name and short id of the run, for messages."""
        return f"{self.run.info.run_name} {self.run.info.run_id[:8]}"

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the export."""
        return read_manifest(self.export.folder)

    @cached_property
    def export_metrics(self) -> dict[str, float]:
        """The metrics of the stage `export`; empty if it has no run."""
        runs = self._children("export")
        return runs[0].data.metrics if runs else {}

    @cached_property
    def evaluation(self) -> Run | None:
        """The newest evaluation of the exported weights."""
        weights, runs = self.manifest.weights, self._children("evaluate")
        return next((run for run in runs if run.data.params.get("evaluate.weights", weights) == weights), None)

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """The columns `label` and `predicted` for the test split, in its order; UserError if there are none."""
        table = self._table("classes.csv")
        if table is None:
            raise UserError(f"{self.name} has no predictions of the test split; `dvc repro evaluate` makes them")
        return table

    @cached_property
    def accuracies(self) -> dict[int, float]:
        """Accuracy of each member on the test split, by its seed; empty for a single network."""
        table = self._table("members.csv")
        return {} if table is None else dict(zip(table["seed"].astype(int), table["accuracy"], strict=True))

    @property
    def dataset(self) -> str:
        """Name and digest of the data set of the evaluation."""
        tags = self.evaluation.data.tags if self.evaluation else {}
        return " ".join(tags.get(tag, "") for tag in ("dataset", "dataset_digest"))

    def _children(self, stage: str) -> list[Run]:
        return self.index({"stage": stage, PARENT: self.run.info.run_id}, finished=True)

    def _table(self, name: str) -> pd.DataFrame | None:
        if self.evaluation is None:
            return None
        text = read_artifact(self.client, self.evaluation.info.run_id, f"results/{name}")
        return pd.read_csv(io.StringIO(text), keep_default_na=False) if text else None


def find_candidate(name: str, client: MlflowClient) -> Candidate:
    """Return the exported training that a name for `find_run` refers to; a child run refers to its training.

    Raises:
        UserError: There is no such run or no export of it, or the export cannot be downloaded; one line.
    """
    index = RunIndex(client)
    run = find_run(name, index.runs())
    if run.data.tags.get("stage") != TRAIN and (parent := run.data.tags.get(PARENT)) in index:
        run = index[str(parent)]
    ready = [model for model in models_of(client, run) if model.status == LoggedModelStatus.READY]
    if not ready:
        name = f"{run.info.run_name} {run.info.run_id[:8]}"
        raise UserError(f"{name}: has no exported model; `dvc repro export` makes it")
    newest = max(ready, key=lambda model: model.creation_timestamp)
    return Candidate(run=run, export=resolve(f"{MODELS}{newest.model_id}"), client=client, index=index)


def find_champion(candidate: Candidate) -> Candidate | None:
    """Return the champion of a candidate's name; None if there is none, UserError if its run or export is gone."""
    name = candidate.manifest.name
    if version_of(name, CHAMPION) is None:
        return None
    export = resolve(f"{MODELS}{name}@{CHAMPION}")
    if export.run_id is None or export.run_id not in candidate.index:
        raise UserError(f"the run of version {export.version} is gone")
    return Candidate(run=candidate.index[export.run_id], export=export, client=candidate.client, index=candidate.index)


def paired_predictions(candidate: Candidate, champion: Candidate) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the labels of the test split, the predictions of the candidate, and those of the champion.

    Raises:
        UserError: Predictions are missing, or the two were evaluated on different test splits; one line.
    """
    first, second = candidate.predictions, champion.predictions
    # Equal labels in the same order, of the same data set, are the same examples.
    if candidate.dataset != champion.dataset or not first["label"].equals(second["label"]):
        raise UserError(
            f"the test splits differ: {candidate.dataset} and {champion.dataset}, {len(first):,} and "
            f"{len(second):,} examples; equal ones are needed to compare"
        )
    return first["label"].to_numpy(), first["predicted"].to_numpy(), second["predicted"].to_numpy()
