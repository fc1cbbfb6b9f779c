"""A store with trainings whose exports are logged, as the pipeline makes them, without running it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus, Run
from projects import ROOT

from gradtrail.stages.common.files import digest
from gradtrail.stages.common.params import PARAMS
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.model.exported import read_manifest
from gradtrail.tracking.store import experiment_id, open_store
from gradtrail.tracking.tags import OUTS

LABELS = np.arange(200) % 10


def enter_store(created: Path, folder: Path, patch: pytest.MonkeyPatch) -> MlflowClient:
    """Copy an empty store, and go to its folder."""
    shutil.copytree(created, folder, dirs_exist_ok=True)
    patch.setenv("DVC_ROOT", str(folder))
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    patch.chdir(folder)
    write_export_params("digits")
    return open_store()


def write_export_params(name: str) -> None:
    """Write the params of the working folder: those of the project, and an export with a name."""
    params = read_yaml(ROOT / PARAMS)
    PARAMS.write_text(
        json.dumps({"export": {"name": name, "batch_sizes": [1, 8, 32, 128]}, "runtime": params["runtime"]})
    )


def training(client: MlflowClient, *, seed: int = 0, name: str = "mlp", export: Path | None = None) -> Run:
    """Log a training whose logged model holds an export; return its run."""
    experiment = experiment_id(client, "models")
    state = f"{seed:064x}"
    tags = {"stage": "train", "state": state, "dataset": "digits", "dataset_digest": "0" * 12}
    run = client.create_run(experiment, run_name=f"{name} {seed}", tags=tags)
    if export:
        log_export(client, run, export)
    client.set_terminated(run.info.run_id)
    return client.get_run(run.info.run_id)


def log_export(client: MlflowClient, run: Run, export: Path) -> str:
    """Log an export as the model of a training's run, and a run of the stage `export`; return the model's id."""
    training, out, about = run.data.tags["state"], digest(export), read_manifest(export)
    tags = {"stage": "export", "state": f"{out[:32]}{training[32:]}", "mlflow.parentRunId": run.info.run_id}
    child = client.create_run(run.info.experiment_id, tags=tags | {OUTS: json.dumps({"models/export": out})})
    client.log_dict(child.info.run_id, {"evaluate": {"state": evaluation_state(run, about.weights)}}, "lineage.json")
    client.set_terminated(child.info.run_id)
    tags = {"export_digest": about.digest, "export_out": out}
    logged = client.create_logged_model(run.info.experiment_id, name="m", source_run_id=run.info.run_id, tags=tags)
    inside = Path(f"{logged.model_id}-model")
    shutil.copytree(export, inside / "data/export")
    client.log_model_artifacts(logged.model_id, str(inside))
    client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
    return str(logged.model_id)


def evaluation_state(train: Run, weights: str) -> str:
    """Return the state of the evaluation of a training's final or best weights."""
    return f"e{weights[0]}{train.data.tags['state'][2:]}"


def evaluation(
    client: MlflowClient,
    train: Run,
    predicted: Sequence[int] | np.ndarray,
    *,
    labels: Sequence[int] | np.ndarray = LABELS,
    dataset_digest: str = "0" * 12,
    weights: str = "final",
) -> Run:
    """Log the evaluation of a training: its predictions."""
    tags = {"stage": "evaluate", "state": evaluation_state(train, weights), "train_state": train.data.tags["state"]}
    tags |= {"mlflow.parentRunId": train.info.run_id, "dataset_digest": dataset_digest}
    run = client.create_run(train.info.experiment_id, run_name="evaluate", tags=tags)
    table = pd.DataFrame({"label": labels, "predicted": predicted})
    client.log_text(run.info.run_id, table.to_csv(index=False), "results/classes.csv")
    client.set_terminated(run.info.run_id)
    return client.get_run(run.info.run_id)
