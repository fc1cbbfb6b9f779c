"""Weights as logged models of MLflow, which anybody can load and serve: `mlflow.pyfunc.load_model("models:/…")`.

A model belongs to the run of its training, and carries the params, the data set and the digest of its weights, and the
validation metrics of its epoch. The weights that `evaluate.weights` names also get the metrics of the evaluation, once
there is one, and its temperature: from then on the model answers with calibrated probabilities. Weights that were not
evaluated have neither. Of a training with several members a model is their ensemble.
"""

import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelInput, LoggedModelOutput, LoggedModelStatus, Metric, Run

import gradtrail
from gradtrail.stages.artifacts.members import has_members, read_folders, seeds_in_words
from gradtrail.stages.common.dataset import DIGEST_LENGTH
from gradtrail.stages.common.digests import digest, folder_digest
from gradtrail.support.errors import UserError
from gradtrail.tracking.mlflow.naming import NOTE

if TYPE_CHECKING:
    from gradtrail.stages.artifacts.weights import WeightsInfo

WEIGHTS = "weights"  # tag of a logged model: final, best or a kept epoch
_DIGEST = "weights_digest"
CALIBRATION, TEMPERATURE = "calibration.json", "temperature"  # in a model that was evaluated, which `pyfunc.py` reads
EXAMPLE = "images.json"  # in a model: one image, in the form that `mlflow models predict` and a server take
_UNCALIBRATED = "not calibrated: no evaluation fitted a temperature yet"
_IN_MODEL_NAMES = str.maketrans({".": "_", "%": "percent", **dict.fromkeys("/:'\"", "-")})
_VALIDATION = ("train/validation_accuracy", "train/validation_loss")
_LOADER = "gradtrail.tracking.mlflow.pyfunc"
_PACKAGES = ("flax", "jax", "jaxlib", "jaxtyping", "filelock", "numpy", "pydantic", "ruamel.yaml", "safetensors")


def log_models(client: MlflowClient, run: Run, folder: Path, *, kept_epochs: bool) -> None:
    """Log the weights in a folder as models of a training's run; models that were logged before stay as they are.

    Args:
        client: of the store.
        run: the training's run, which has its params.
        folder: with `final.safetensors`, `best.safetensors` and `epochs/`; those of several members are below it.
        kept_epochs: whether to log the weights of the kept epochs too.
    """
    names = {name: f"{name}.safetensors" for name in ("final", "best")}
    names |= {path.stem: f"epochs/{path.name}" for path in sorted((folder / "epochs").glob("*")) if kept_epochs}
    members = read_folders(folder, folder) if has_members(folder) else {0: folder}
    logged = {model.tags[_DIGEST] + model.tags[WEIGHTS] for model in models_of(client, run) if _is_ready(client, model)}
    for name, file in names.items():
        paths = {seed: own / file for seed, own in members.items() if (own / file).is_file()}
        if paths and _digest_of(paths) + name not in logged:
            _log_model(client, run, name, paths)


def models_of(client: MlflowClient, run: Run) -> Iterator[LoggedModel]:
    """Yield the logged models of a training's run."""
    condition = f"source_run_id = '{run.info.run_id}'"
    found = client.search_logged_models([run.info.experiment_id], filter_string=condition)
    yield from (model for model in found if WEIGHTS in model.tags)


def delete_models(client: MlflowClient, run: Run) -> None:
    """Delete the models of a run that is being deleted; MLflow keeps them until `mlflow gc`."""
    for model in models_of(client, run):
        client.delete_logged_model(model.model_id)


def link_evaluation(client: MlflowClient, evaluation: Run, train: Run) -> LoggedModel | None:
    """Log the model that was evaluated as an input of the evaluation's run, and let it use the temperature.

    Returns:
        The model; None where none was logged.
    """
    weights = evaluation.data.params.get("evaluate.weights")
    model = next((model for model in models_of(client, train) if model.tags[WEIGHTS] == weights), None)
    known = evaluation.inputs.model_inputs if evaluation.inputs else []
    if model and model.model_id not in {found.model_id for found in known}:
        client.log_inputs(evaluation.info.run_id, models=[LoggedModelInput(model.model_id)])
    metrics = evaluation.data.metrics
    temperature = metrics.get("eval/ensemble_temperature", metrics.get("eval/temperature"))
    if (
        model and temperature is not None and _UNCALIBRATED in model.tags.get(NOTE, "")
    ):  # older ones read no temperature
        _calibrate(client, model, temperature)
    return model


def _calibrate(client: MlflowClient, model: LoggedModel, temperature: float) -> None:
    """Add the file with the temperature to a logged model, and say so."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CALIBRATION).write_text(json.dumps({TEMPERATURE: temperature}), encoding="utf-8")
        client.log_model_artifacts(model.model_id, folder)
    words = model.tags.get(NOTE, "").replace(_UNCALIBRATED, f"calibrated, by a temperature of {temperature:.3g}")
    client.set_logged_model_tags(model.model_id, {TEMPERATURE: f"{temperature:.6g}", NOTE: words})


def save(path: Path, weights: Mapping[int, Path], about: "WeightsInfo", ids: Mapping[str, str]) -> None:
    """Write a model as MLflow loads it: the weights, the modules that read them, and the packages that these need.

    Args:
        path: the folder to make.
        weights: weights file of each member, by seed.
        about: the metadata of the first.
        ids: `run_id` and `model_id`, where it is logged.
    """
    with warnings.catch_warnings():  # about types in a module of MLflow itself
        warnings.simplefilter("ignore", UserWarning)
        import mlflow.pyfunc  # late: only a training needs it
    from mlflow.models import Model as MlflowModel

    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as gathered:
        code = _copy_code(Path(name))
        data = next(iter(weights.values()))
        if len(weights) > 1:
            data = Path(gathered) / "members"
            data.mkdir()
            for seed, file in weights.items():
                shutil.copyfile(file, data / f"seed_{seed:010}.safetensors")  # in their order
        mlflow.pyfunc.save_model(
            path,
            mlflow_model=MlflowModel(**ids),
            loader_module=_LOADER,
            data_path=str(data),
            code_paths=[str(code)],
            signature=_signature(about.model.num_classes),
            pip_requirements=[f"mlflow=={mlflow.__version__}", *(f"{name}=={version(name)}" for name in _PACKAGES)],
            input_example=_stroke(about.model.image_shape),
            metadata={"input": _input(about)},
        )
    example = {"inputs": _stroke(about.model.image_shape).tolist()}
    (path / EXAMPLE).write_text(json.dumps(example), encoding="utf-8")


def _digest_of(weights: Mapping[int, Path]) -> str:
    """Return the digest of a weights file, or that of a folder with those of all members."""
    if len(weights) == 1:
        return digest(next(iter(weights.values())))
    return folder_digest({f"seed_{seed}": digest(path) for seed, path in weights.items()})


def _log_model(client: MlflowClient, run: Run, name: str, weights: Mapping[int, Path]) -> None:
    from gradtrail.stages.artifacts.weights import read_weights  # late: it imports JAX

    try:
        about, *others = [read_weights(path)[2] for path in weights.values()]
    except UserError as error:  # written by older code in another form: the run has no model that could be served
        print(f"warning: {error}; no MLflow model is logged for it", file=sys.stderr)
        return
    epochs = sorted({each.epoch for each in (about, *others)})
    epoch = ", ".join(map(str, epochs))
    tags = {WEIGHTS: name, _DIGEST: _digest_of(weights), "dataset": about.dataset.label, "epoch": epoch}
    logged = client.create_logged_model(
        run.info.experiment_id,
        name=_model_name(run, name),
        source_run_id=run.info.run_id,
        tags=tags,
        params=run.data.params,
        model_type="classifier",
    )
    after = f"eights after epoch{'s' if len(epochs) > 1 else ''} {epoch}"
    networks = f"Mean probabilities of {len(weights)} networks, {seeds_in_words([*weights])}; w"
    whose = f"{networks if others else 'W'}{after}"
    words = _how_to_use(client.tracking_uri, logged.model_id, about, whose)
    client.set_logged_model_tags(logged.model_id, {NOTE: words})
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "model"
        save(saved, weights, about, {"run_id": run.info.run_id, "model_id": logged.model_id})
        client.log_model_artifacts(logged.model_id, str(saved))
    client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
    if len(epochs) == 1:
        _attach_validation(client, run, logged.model_id, about)
    client.log_outputs(run.info.run_id, [LoggedModelOutput(logged.model_id, step=max(epochs))])


def _model_name(run: Run, weights: str) -> str:
    """Return the name of a model: that of its run, without the characters that MLflow refuses in names of models."""
    return f"{run.info.run_name} · {weights}".translate(_IN_MODEL_NAMES)


def _input(about: "WeightsInfo") -> str:
    height, width = about.model.image_shape
    return f"array (images, {height}, {width}), or one image ({height}, {width}): uint8, or floats from 0 to 1"


def _how_to_use(tracking_uri: str, model_id: str, about: "WeightsInfo", whose: str) -> str:
    """Return the recipe for loading a model, in any folder, and what it takes and returns."""
    return f"""{whose}, trained on {about.dataset.label}. In any folder:

```
import json
import mlflow
mlflow.set_tracking_uri("{tracking_uri}")
folder = mlflow.artifacts.download_artifacts("models:/{model_id}")
model = mlflow.pyfunc.load_model(folder)
model.predict(json.load(open(f"{{folder}}/{EXAMPLE}"))["inputs"])
```

It takes an {_input(about)}, bright ink on 0, and returns `label` and `probabilities`, which are {_UNCALIBRATED}.
"""


def _attach_validation(client: MlflowClient, run: Run, model_id: str, about: "WeightsInfo") -> None:
    """Attach to the model the validation metrics that the run has at the epoch of the weights: means over members."""
    of = {"model_id": model_id, "run_id": run.info.run_id}
    of |= {"dataset_name": about.dataset.name, "dataset_digest": about.dataset.digest[:DIGEST_LENGTH]}
    metrics = [
        Metric(point.key, point.value, point.timestamp, point.step, **of)
        for name in _VALIDATION
        for point in client.get_metric_history(run.info.run_id, name)
        if point.step == about.epoch
    ]
    if metrics:  # the same points as those of the run, so that it has none of them twice
        client.log_batch(run.info.run_id, metrics=metrics)


def _is_ready(client: MlflowClient, model: LoggedModel) -> bool:
    """Whether a model is complete; one that a killed process began is deleted."""
    if model.status != LoggedModelStatus.READY:
        client.delete_logged_model(model.model_id)
        return False
    return True


def _copy_code(to: Path) -> Path:
    """Copy the loader and the modules that it imports, late ones included; return the folder of the package."""
    import grimp  # late: only a training needs it

    graph = grimp.build_graph("gradtrail", exclude_type_checking_imports=True, cache_dir=None)
    package = Path(gradtrail.__file__ or "").parent
    for module in (_LOADER, *graph.find_upstream_modules(_LOADER)):
        parts = module.split(".")
        for depth in range(1, len(parts)):  # without these, a `gradtrail` that is installed would be imported
            folder = to.joinpath(*parts[:depth])
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        shutil.copyfile(package.joinpath(*parts[1:]).with_suffix(".py"), to.joinpath(*parts).with_suffix(".py"))
    return to / package.name


def _signature(num_classes: int) -> Any:
    """Describe the outputs alone.

    MLflow accepts a described input of one dtype and one rank only, and refuses others in an error that has all pixels;
    `ServedModel` takes integers, floats, lists and single images, and refuses others in one line.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    label = TensorSpec(np.dtype(np.int64), (-1,), "label")
    probabilities = TensorSpec(np.dtype(np.float32), (-1, num_classes), "probabilities")
    return ModelSignature(outputs=Schema([label, probabilities]))


def _stroke(shape: tuple[int, int]) -> np.ndarray:
    """Return one image, (1, height, width), uint8: an upright stroke, as of a 1."""
    height, width = shape
    image = np.zeros((1, height, width), np.uint8)
    image[:, height // 5 : -(height // 5), width // 2 - 1 : width // 2 + 1] = 255
    return image
