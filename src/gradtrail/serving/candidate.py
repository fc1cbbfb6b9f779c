"""An exported training that is judged or released: its export, its evaluation and its predictions.

A training may have several exports, such as of its final and its best weights. The run of the stage `export` tells them
apart: it names the digest of its output, and the state of the evaluation that it read.
"""

import io
import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus, Run

from gradtrail.serving.registry import CHAMPION, MODELS, Reference, resolve, version_of
from gradtrail.stages.common.files import digest
from gradtrail.stages.model.exported import Manifest, read_manifest
from gradtrail.support.errors import UserError, one_line
from gradtrail.tracking.artifacts import read_artifact
from gradtrail.tracking.find_run import find_run
from gradtrail.tracking.models import models_of
from gradtrail.tracking.render import EXPORT
from gradtrail.tracking.runs import RunIndex
from gradtrail.tracking.tags import EXPORT_OUT, OUTS, PARENT, outputs

_STAGE = "export"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An exported training."""

    run: Run
    export: Reference
    exported: Run | None  # run of the stage `export`; None if it is gone
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
        return self.exported.data.metrics if self.exported else {}

    @cached_property
    def evaluation(self) -> Run | None:
        """The evaluation that the export read."""
        lineage = read_artifact(self.client, self.exported.info.run_id, "lineage.json") if self.exported else ""
        state = json.loads(lineage or "{}").get("evaluate", {}).get("state", "")
        return next(iter(self.index({"stage": "evaluate", "state": state}, finished=True)), None)

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

    def _table(self, name: str) -> pd.DataFrame | None:
        if self.evaluation is None:
            return None
        text = read_artifact(self.client, self.evaluation.info.run_id, f"results/{name}")
        return pd.read_csv(io.StringIO(text), keep_default_na=False) if text else None


def find_candidate(name: str, client: MlflowClient) -> Candidate:
    """Return the training, and of its exports the one, that a name for `find_run` refers to.

    Raises:
        UserError: There is no export with this name or more than one, or it cannot be downloaded; one line.
    """
    index = RunIndex(client)
    exported = find_run(name, index, _STAGE, apart=OUTS)
    training, out = exported.data.tags.get(PARENT, ""), outputs(exported.data.tags).get(EXPORT)
    for model in models_of(client, index[training]) if training in index else ():
        if model.tags.get(EXPORT_OUT) == out and model.status == LoggedModelStatus.READY:
            export = resolve(f"{MODELS}{model.model_id}")
            return Candidate(run=index[training], export=export, exported=exported, client=client, index=index)
    raise UserError(
        f"{one_line(name)[:100]}: its export, {EXPORT} with md5 {out}, is no model in MLflow's store; "
        "`dvc repro export` or `gradtrail sync` logs it"
    )


def find_champion(candidate: Candidate) -> Candidate | None:
    """Return the champion of a candidate's name; None if there is none, UserError if its run or export is gone."""
    name = candidate.manifest.name
    if version_of(name, CHAMPION) is None:
        return None
    export = resolve(f"{MODELS}{name}@{CHAMPION}")
    if export.run_id is None or export.run_id not in candidate.index:
        raise UserError(f"the run of version {export.version} is gone")
    index, out = candidate.index, digest(export.folder)
    exports = index({"stage": _STAGE, PARENT: export.run_id}, finished=True)
    exported = next((run for run in exports if outputs(run.data.tags).get(EXPORT) == out), None)
    run = index[export.run_id]
    return Candidate(run=run, export=export, exported=exported, client=candidate.client, index=index)


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
