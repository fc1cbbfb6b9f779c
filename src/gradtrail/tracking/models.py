"""Exports as logged models of MLflow, which anybody can load and serve: `mlflow.pyfunc.load_model("models:/…")`.

A model belongs to the run of its training, whose params it has, and contains `models/export` as `data/export`. The run
of the evaluation that fitted its temperature has it as an input, and the metrics of that run are the model's too.
"""

import contextlib
import math
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelInput, LoggedModelOutput, LoggedModelStatus, Metric, Run
from mlflow.exceptions import MlflowException
from mlflow.utils import get_results_from_paginated_fn

import gradtrail
from gradtrail.stages.common.files import digest
from gradtrail.stages.model.members import format_seeds
from gradtrail.tracking.names import rendered
from gradtrail.tracking.store import experiment_id
from gradtrail.tracking.tags import (
    EXPORT_DIGEST,
    EXPORT_OUT,
    MODEL_WEIGHTS,
    NOTE,
    TEMPERATURE,
    is_alive,
    is_of_this_host,
    process_tags,
)

if TYPE_CHECKING:
    from gradtrail.stages.model.exported import Manifest

# The loader, and what it imports
LOADED = ("gradtrail.tracking.pyfunc", "gradtrail.stages.model.exported", "gradtrail.support.errors")
_PACKAGES = ("flatbuffers", "jax", "jaxlib", "jaxtyping", "mlflow", "numpy", "safetensors")  # which these import


def log_export(client: MlflowClient, train: Run, folder: Path) -> None:
    """Log an export as a model of a training's run, unless the run has it; UserError if its manifest is unreadable."""
    from gradtrail.stages.model.exported import read_manifest  # late: it imports JAX

    run_id, manifest = train.info.run_id, read_manifest(folder)
    for model in models_of(client, train):
        is_usable = model.status == LoggedModelStatus.READY or is_alive(model.tags)
        if is_usable and model.tags[EXPORT_DIGEST] == manifest.digest:
            return
        if not is_usable and is_of_this_host(model.tags):
            client.delete_logged_model(model.model_id)

    model = client.create_logged_model(
        train.info.experiment_id,
        name=re.sub("[./:%'\"]", "-", f"{train.info.run_name} · {manifest.weights}"),  # MLflow refuses these
        source_run_id=run_id,
        tags={
            MODEL_WEIGHTS: manifest.weights,
            EXPORT_DIGEST: manifest.digest,
            EXPORT_OUT: digest(folder),
            TEMPERATURE: f"{manifest.temperature:.6g}",
            **process_tags(),
        },
        params=train.data.params,
        model_type="classifier",
    )
    client.set_logged_model_tags(model.model_id, {NOTE: describe_model(client.tracking_uri, model.model_id, manifest)})
    with tempfile.TemporaryDirectory() as name:
        save(Path(name) / "model", folder, {"run_id": run_id, "model_id": model.model_id})
        client.log_model_artifacts(model.model_id, f"{name}/model")
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=max(manifest.epochs))])


def logged_exports(client: MlflowClient) -> list[LoggedModel]:
    """Return the complete models of all exports."""
    models = _search(client, experiment_id(client, "models"), f"tags.`{EXPORT_OUT}` != ''")
    return [model for model in models if model.status == LoggedModelStatus.READY]


def models_of(client: MlflowClient, run: Run) -> list[LoggedModel]:
    """Return the logged models of a training's run, the newest first."""
    models = _search(client, run.info.experiment_id, f"source_run_id = '{run.info.run_id}'")
    return [model for model in models if EXPORT_DIGEST in model.tags]


def registered_models(client: MlflowClient) -> set[str]:
    """Return the ids of the logged models and runs that MLflow's registry needs, which this project never deletes."""
    ids = set[str]()
    for registered in client.search_model_versions(max_results=100_000):
        model_id = registered.model_id or registered.source.removeprefix("models:/")
        ids |= {model_id, registered.run_id or model_id}
        with contextlib.suppress(MlflowException):  # the model was deleted, or is no logged one
            ids.add(str(client.get_logged_model(model_id).source_run_id))
    return ids


def log_evaluation(client: MlflowClient, evaluation: Run, train: Run, headlines: Mapping[str, float]) -> None:
    """Log the model that an evaluation calibrated as its input, and its headline metrics, which `train` has, for it."""
    run_id, data = train.info.run_id, evaluation.data
    temperature = data.metrics.get("eval/ensemble_temperature", data.metrics.get("eval/temperature", math.nan))
    for model in models_of(client, train):
        is_calibrated = math.isclose(float(model.tags[TEMPERATURE]), temperature, rel_tol=1e-3)  # four digits
        same_weights = model.tags[MODEL_WEIGHTS] == data.params.get("evaluate.weights")
        if not (is_calibrated and same_weights and model.status == LoggedModelStatus.READY):
            continue
        # MLflow keeps one input of a model, however often it is logged, and adds no second point to the run
        client.log_inputs(evaluation.info.run_id, models=[LoggedModelInput(model.model_id)])
        labels = {"model_id": model.model_id, "run_id": run_id}
        labels |= {"dataset_name": data.tags.get("dataset"), "dataset_digest": data.tags.get("dataset_digest")}
        by_time = attrgetter("timestamp")
        logged = {point.key: point.value for point in sorted(model.metrics or (), key=by_time)}
        missing = [name for name, value in headlines.items() if logged.get(name) != value]
        last = [max(client.get_metric_history(run_id, name), key=by_time) for name in missing]
        points = [Metric(point.key, point.value, point.timestamp, point.step, **labels) for point in last]
        client.log_batch(run_id, metrics=points)
        return


def save(path: Path, export: Path, ids: dict[str, str]) -> None:
    """Write a model to a new folder as MLflow loads it: the export, the modules that read it, and their packages.

    `ids` are the `run_id` and `model_id` of a logged model.
    """
    with warnings.catch_warnings(action="ignore"):  # about types in a module of MLflow itself
        import mlflow.pyfunc  # late: only an export needs it
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    from gradtrail.stages.model.exported import read_manifest

    manifest = read_manifest(export)
    label = TensorSpec(np.dtype(np.int64), (-1,), "label")
    probabilities = TensorSpec(np.dtype(np.float32), (-1, len(manifest.classes)), "probabilities")
    height, width = manifest.image_shape[:2]
    digit = np.zeros((1, *manifest.image_shape), np.uint8)  # an image of a 1
    digit[:, height // 5 : -(height // 5), width // 2 - 1 : width // 2 + 1] = 255
    with tempfile.TemporaryDirectory() as name:
        mlflow.pyfunc.save_model(
            path,
            mlflow_model=Model(**ids),
            loader_module=LOADED[0],
            data_path=str(export),
            code_paths=[str(_copy_code(Path(name)))],
            # No inputs: MLflow would cast JSON to their one dtype, so that 0.5 as uint8 is 0, and accept one rank
            signature=ModelSignature(outputs=Schema([label, probabilities])),
            pip_requirements=[f"{name}=={version(name)}" for name in _PACKAGES],
            input_example=digit,
        )


def _search(client: MlflowClient, experiment: str, condition: str) -> list[LoggedModel]:
    models: list[LoggedModel] = get_results_from_paginated_fn(
        lambda size, token: client.search_logged_models([experiment], condition, max_results=size, page_token=token),
        100,  # of a page
    )
    return models


def _copy_code(to: Path) -> Path:
    """Copy the modules that load an export; return the folder of the package."""
    package = Path(gradtrail.__file__ or "").parent
    for module in LOADED:
        source = package.parent.joinpath(*module.split(".")).with_suffix(".py")
        copy = to / source.relative_to(package.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    for folder in to.rglob("*/"):
        (folder / "__init__.py").touch()  # else a `gradtrail` that is installed would be imported
    return to / package.name


def describe_model(tracking_uri: str, model_id: str, manifest: "Manifest") -> str:
    """Return the recipe for loading a model in any folder, with its input and output."""
    shape, epochs = (", ".join(map(str, values)) for values in (manifest.image_shape, sorted({*manifest.epochs})))
    seeds, place = format_seeds(manifest.seeds), {"tracking_uri": tracking_uri, "model_id": model_id}
    return rendered("model.md.j2", **place, manifest=manifest, seeds=seeds, epochs=epochs, shape=shape)
