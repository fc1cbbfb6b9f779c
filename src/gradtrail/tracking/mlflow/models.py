"""Exports as logged models of MLflow, which anybody can load and serve: `mlflow.pyfunc.load_model("models:/…")`.

A model belongs to the run of its training, and has the params, the data set and the digest of its export. It contains
the files of `models/export` under `data/export`, so the stage `export` logs it, or `gradtrail sync` from the outputs.
The run of the evaluation that fitted its temperature has it as an input, and its metrics are the model's too.
"""

import contextlib
import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelInput, LoggedModelOutput, LoggedModelStatus, Metric, Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.entities import PagedList
from mlflow.utils import get_results_from_paginated_fn

import gradtrail
from gradtrail.stages.artifacts.members import format_seeds
from gradtrail.stages.common.files import digest
from gradtrail.tracking.mlflow.naming import NOTE

if TYPE_CHECKING:
    from gradtrail.stages.artifacts.exported import Manifest

EXPORT = "models/export"  # the output
WEIGHTS, EXPORT_DIGEST = "weights", "export_digest"  # tags of a logged model: final or best; `Manifest.digest`
_OUT = "export_out"  # tag: digest of the output, as DVC has it
_TEMPERATURE = "temperature"  # tag
EXAMPLE = "images.json"  # in a model: one image, as input for `mlflow models predict` and a server
_IN_MODEL_NAMES = str.maketrans({".": "_", "%": "percent", **dict.fromkeys("/:'\"", "-")})
_VALIDATION = ("train/validation_accuracy", "train/validation_loss")
_LOADER = "gradtrail.tracking.mlflow.pyfunc"
LOADED = (  # the loader, and what it imports
    *(_LOADER, "gradtrail.stages.artifacts.exported"),
    *("gradtrail.support.errors", "gradtrail.support.secrets"),
)
_PAGE_SIZE = 100
_PACKAGES = ("flatbuffers", "jax", "jaxlib", "jaxtyping", "mlflow", "numpy", "safetensors")  # which these import


def log_export(client: MlflowClient, train: Run, folder: Path) -> None:
    """Log an exported model as a model of a training's run, unless the run has it.

    Args:
        client: Client of the store.
        train: Run of the training that wrote the weights, which has its params.
        folder: Folder of the export.

    Raises:
        UserError: It has no manifest of this version.
    """
    from gradtrail.stages.artifacts.exported import read_manifest  # late: it imports JAX

    manifest, out = read_manifest(folder), digest(folder)
    ready = [model for model in models_of(client, train) if _is_ready(client, model)]
    if not any(model.tags[EXPORT_DIGEST] == manifest.digest for model in ready):
        _log_model(client, train, manifest, folder, out)


def logged_exports(client: MlflowClient, experiment: str) -> set[tuple[str, str]]:
    """Return (run of a training, digest of the output `models/export`) of each complete model."""
    models = _search(client, experiment, f"tags.`{_OUT}` != ''")
    return {(model.source_run_id, model.tags[_OUT]) for model in models if model.status == LoggedModelStatus.READY}


def models_of(client: MlflowClient, run: Run) -> Iterator[LoggedModel]:
    """Yield the logged models of a training's run, the newest first."""
    models = _search(client, run.info.experiment_id, f"source_run_id = '{run.info.run_id}'")
    yield from (model for model in models if EXPORT_DIGEST in model.tags)


def registered_models(client: MlflowClient) -> set[str]:
    """Return the ids of logged models that have a version in MLflow's registry, and of their runs, which must stay."""

    def page(size: int, token: str | None) -> PagedList[ModelVersion]:
        return client.search_model_versions(max_results=size, page_token=token)

    ids = set[str]()
    for registered in get_results_from_paginated_fn(page, _PAGE_SIZE):
        source = registered.source.removeprefix("models:/") if registered.source.startswith("models:/m-") else None
        model = registered.model_id or source
        ids |= {str(name) for name in (model, registered.run_id) if name}
        with contextlib.suppress(MlflowException):  # of a model that was deleted
            ids |= {str(client.get_logged_model(model).source_run_id)} if model else set()
    return ids


def delete_models(client: MlflowClient, run: Run) -> None:
    """Delete the models of a run that is being deleted, registered ones aside; MLflow keeps them until `mlflow gc`."""
    registered = registered_models(client)
    for model in models_of(client, run):
        if model.model_id not in registered:
            client.delete_logged_model(model.model_id)


def link_evaluation(client: MlflowClient, evaluation: Run, train: Run) -> LoggedModel | None:
    """Log the model that an evaluation calibrated as an input of the evaluation's run.

    Returns:
        The model; None if none was logged yet.
    """
    model = next((model for model in models_of(client, train) if _is_of(model, evaluation)), None)
    if model:
        run = client.get_run(evaluation.info.run_id)  # MLflow's search returns runs without their model inputs
        if not run.inputs or model.model_id not in {logged.model_id for logged in run.inputs.model_inputs}:
            client.log_inputs(run.info.run_id, models=[LoggedModelInput(model.model_id)])
    return model


def attach_metrics(
    client: MlflowClient, train: Run, model: LoggedModel, names: Iterable[str], data: dict[str, str]
) -> None:
    """Log metrics of a training's run for its model too, at the same points, so that MLflow adds no second point.

    Args:
        client: Client of the store.
        train: Run with the metrics.
        model: Model that was logged after them.
        names: Names of metrics; the last point of each is logged.
        data: `dataset_name` and `dataset_digest` of the data on which they were measured.
    """
    logged = {metric.key for metric in model.metrics or ()}
    labels = {"model_id": model.model_id, "run_id": train.info.run_id, **data}
    metrics = []
    for name in set(names) - logged:
        history = client.get_metric_history(train.info.run_id, name)
        last = max(history, key=lambda point: (point.step, point.timestamp), default=None)
        metrics += [Metric(last.key, last.value, last.timestamp, last.step, **labels)] if last else []
    if metrics:
        client.log_batch(train.info.run_id, metrics=metrics)


def save(path: Path, export: Path, ids: dict[str, str]) -> None:
    """Write a model as MLflow loads it: the export, the modules that read it, and the packages that these need.

    Args:
        path: Folder to make.
        export: Folder of the export, which has the same name in `data`.
        ids: `run_id` and `model_id` of a logged model.
    """
    with warnings.catch_warnings():  # about types in a module of MLflow itself
        warnings.simplefilter("ignore", UserWarning)
        import mlflow.pyfunc  # late: only an export needs it
    from mlflow.models import Model as MlflowModel

    from gradtrail.stages.artifacts.exported import read_manifest

    manifest = read_manifest(export)
    stroke = _stroke(manifest.image_shape)
    with tempfile.TemporaryDirectory() as name:
        mlflow.pyfunc.save_model(
            path,
            mlflow_model=MlflowModel(**ids),
            loader_module=_LOADER,
            data_path=str(export),
            code_paths=[str(_copy_code(Path(name)))],
            signature=_signature(len(manifest.classes)),
            pip_requirements=[f"{name}=={version(name)}" for name in _PACKAGES],
            input_example=stroke,
            metadata={"input": _input(manifest)},
            model_config={EXPORT_DIGEST: manifest.digest},
        )
    (path / EXAMPLE).write_text(json.dumps({"inputs": stroke.tolist()}), encoding="utf-8")


def _log_model(client: MlflowClient, train: Run, manifest: "Manifest", folder: Path, out: str) -> None:
    tags = {WEIGHTS: manifest.weights, EXPORT_DIGEST: manifest.digest, _OUT: out, "dataset": manifest.dataset}
    tags |= {"epoch": _epochs(manifest), _TEMPERATURE: f"{manifest.temperature:.6g}"}
    logged = client.create_logged_model(
        train.info.experiment_id,
        name=_model_name(train, manifest.weights),
        source_run_id=train.info.run_id,
        tags=tags,
        params=train.data.params,
        model_type="classifier",
    )
    words = _how_to_use(client.tracking_uri, logged.model_id, manifest)
    client.set_logged_model_tags(logged.model_id, {NOTE: words})
    with tempfile.TemporaryDirectory() as name:
        saved = Path(name) / "model"
        save(saved, folder, {"run_id": train.info.run_id, "model_id": logged.model_id})
        client.log_model_artifacts(logged.model_id, str(saved))
    client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
    if len({*manifest.epochs}) == 1:
        _attach_validation(client, train, logged.model_id, manifest)
    client.log_outputs(train.info.run_id, [LoggedModelOutput(logged.model_id, step=max(manifest.epochs))])


def _search(client: MlflowClient, experiment: str, condition: str) -> list[LoggedModel]:
    def page(size: int, token: str | None) -> PagedList[LoggedModel]:
        return client.search_logged_models([experiment], condition, max_results=size, page_token=token)

    models: list[LoggedModel] = get_results_from_paginated_fn(page, _PAGE_SIZE)
    return models


def _is_of(model: LoggedModel, evaluation: Run) -> bool:
    """Whether a model has the weights and the temperature of an evaluation."""
    metrics = evaluation.data.metrics
    temperature = metrics.get("eval/ensemble_temperature", metrics.get("eval/temperature", math.nan))
    is_same = model.tags[WEIGHTS] == evaluation.data.params.get("evaluate.weights")
    is_complete = model.status == LoggedModelStatus.READY
    return is_same and is_complete and math.isclose(float(model.tags[_TEMPERATURE]), temperature, rel_tol=1e-5)


def _model_name(run: Run, weights: str) -> str:
    """Return the name of a model: its run's, without the characters that MLflow refuses in names of models."""
    return f"{run.info.run_name} · {weights}".translate(_IN_MODEL_NAMES)


def _epochs(manifest: "Manifest") -> str:
    return ", ".join(map(str, sorted({*manifest.epochs})))


def _input(manifest: "Manifest") -> str:
    height, width = manifest.image_shape
    form = "integers from 0 to 255 that are not all 0 or 1, or floats from 0 to 1"
    return f"array (images, {height}, {width}), or one image ({height}, {width}), of {form}"


def _how_to_use(tracking_uri: str, model_id: str, manifest: "Manifest") -> str:
    """Return the recipe for loading a model in any folder, with its input and output."""
    epochs = f"eights after epoch{'s' if len({*manifest.epochs}) > 1 else ''} {_epochs(manifest)}"
    networks = f"Mean probabilities of {len(manifest.seeds)} networks, {format_seeds(manifest.seeds)}; w"
    whose = f"{networks if len(manifest.seeds) > 1 else 'W'}{epochs}"
    return f"""{whose}, trained on {manifest.dataset}; StableHLO, without Flax. In any folder:

```
import json
import mlflow
mlflow.set_tracking_uri("{tracking_uri}")
folder = mlflow.artifacts.download_artifacts("models:/{model_id}")
model = mlflow.pyfunc.load_model(folder)
model.predict(json.load(open(f"{{folder}}/{EXAMPLE}"))["inputs"])
```

It takes an {_input(manifest)}, bright ink on 0, and returns `label` and `probabilities`, which are calibrated, by a \
temperature of {manifest.temperature:.3g}.
"""


def _attach_validation(client: MlflowClient, run: Run, model_id: str, manifest: "Manifest") -> None:
    """Attach the run's validation metrics at the epoch of the weights to the model: means over members."""
    labels = {"model_id": model_id, "run_id": run.info.run_id, "dataset_name": manifest.dataset.partition(" ")[0]}
    labels |= {"dataset_digest": run.data.tags.get("dataset_digest", "")}
    metrics = [
        Metric(point.key, point.value, point.timestamp, point.step, **labels)
        for name in _VALIDATION
        for point in client.get_metric_history(run.info.run_id, name)
        if point.step == manifest.epochs[0]
    ]
    if metrics:  # the same points as the run's, so that none is logged twice
        client.log_batch(run.info.run_id, metrics=metrics)


def _is_ready(client: MlflowClient, model: LoggedModel) -> bool:
    """Whether a model is complete; one that a killed process began is deleted."""
    if model.status != LoggedModelStatus.READY:
        client.delete_logged_model(model.model_id)
        return False
    return True


def _copy_code(to: Path) -> Path:
    """Copy the modules that load an export; return the folder of the package."""
    package = Path(gradtrail.__file__ or "").parent
    for module in LOADED:
        parts = module.split(".")
        for depth in range(1, len(parts)):  # without these, a `gradtrail` that is installed would be imported
            folder = to.joinpath(*parts[:depth])
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        shutil.copyfile(package.joinpath(*parts[1:]).with_suffix(".py"), to.joinpath(*parts).with_suffix(".py"))
    return to / package.name


def _signature(num_classes: int) -> Any:
    """Describe the outputs alone.

    MLflow accepts a described input of one dtype and one rank only, and casts JSON to it: as uint8 a 0.5 becomes 0.
    `ServedModel` takes integers, floats, lists and single images, and refuses others in one line; the model's metadata
    have the form as text.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    label = TensorSpec(np.dtype(np.int64), (-1,), "label")
    probabilities = TensorSpec(np.dtype(np.float32), (-1, num_classes), "probabilities")
    return ModelSignature(outputs=Schema([label, probabilities]))


def _stroke(shape: tuple[int, int]) -> np.ndarray:
    """Return one image, (1, height, width), uint8: a vertical stroke, as in a 1."""
    height, width = shape
    image = np.zeros((1, height, width), np.uint8)
    image[:, height // 5 : -(height // 5), width // 2 - 1 : width // 2 + 1] = 255
    return image
