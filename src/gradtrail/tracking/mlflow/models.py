"""Which files of the project a script imports, directly or not: read from the source, so that late imports count.

Weights as logged models of MLflow, which anybody can load and serve: `mlflow.pyfunc.load_model("models:/…")`.

A model hangs on the row of its training, and carries the params, the data set and the digest of its weights. The
figures of an evaluation name the model that they are of, so that the UI compares models as it compares rows.
"""

import ast
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from mlflow import MlflowClient
from mlflow.entities import (
    LoggedModel,
    LoggedModelInput,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Run,
)

from gradtrail.stages.artifacts.weights import WeightsInfo, read_weights
from gradtrail.stages.common.digests import digest
from gradtrail.support.errors import UserError
from gradtrail.tracking.mlflow.naming import NOTE

PACKAGE = Path(__file__).resolve().parents[1]


def import_closure(script: Path, root: Path, *, stop_at: frozenset[str] = frozenset()) -> set[str]:
    """Return the script and all files of the package that it reaches, relative to a folder that holds them.

    Modules in `stop_at` are neither listed nor followed. Empty `__init__.py` files say nothing and are left out.
    """
    found: set[str] = set()
    waiting = [script]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix()
        if name in found | stop_at:
            continue
        found.add(name)
        waiting += [file for module in _imported(path) if (file := _file_of(module))]
    return found


def _imported(path: Path) -> set[str]:
    """Return the dotted names that a file imports anywhere but under `if TYPE_CHECKING`."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return names


def _file_of(module: str) -> Path | None:
    file = PACKAGE.parent / Path(*module.split(".")).with_suffix(".py")
    return file if module.startswith(f"{PACKAGE.name}.") and file.is_file() else None


WEIGHTS = "weights"  # tag of a logged model: final, best or a kept epoch
_DIGEST = "weights_digest"
_VALIDATION = ("train/validation_accuracy", "train/validation_loss")
DIGEST_LENGTH = 32  # of a data set, in MLflow: it takes no more
_LOADER = "gradtrail.tracking.mlflow.pyfunc"
_PACKAGES = ("flax", "jax", "jaxlib", "jaxtyping", "filelock", "numpy", "pydantic", "ruamel.yaml", "safetensors")


def log_models(client: MlflowClient, run: Run, folder: Path, *, kept_epochs: bool) -> None:
    """Log the weights in a folder as models of a training's row; what was logged before stays as it is.

    Args:
        client: of the store.
        run: the training's row, which has its params.
        folder: with `final.safetensors`, `best.safetensors` and `epochs/`.
        kept_epochs: whether the weights of the kept epochs are wanted too.
    """
    paths = {name: folder / f"{name}.safetensors" for name in ("final", "best")}
    paths |= {path.stem: path for path in sorted((folder / "epochs").glob("*.safetensors")) if kept_epochs}
    logged = {model.tags[_DIGEST] + model.tags[WEIGHTS] for model in models_of(client, run) if _is_ready(client, model)}
    for name, path in paths.items():
        if path.is_file() and digest(path) + name not in logged:
            _log_model(client, run, name, path)


def models_of(client: MlflowClient, run: Run) -> Iterator[LoggedModel]:
    """Yield the logged models of a training's row."""
    condition = f"source_run_id = '{run.info.run_id}'"
    found = client.search_logged_models([run.info.experiment_id], filter_string=condition)
    yield from (model for model in found if WEIGHTS in model.tags)


def delete_models(client: MlflowClient, run: Run) -> None:
    """Delete the models of a row that goes; MLflow keeps what it deletes until `mlflow gc`."""
    for model in models_of(client, run):
        client.delete_logged_model(model.model_id)


def link_evaluation(client: MlflowClient, evaluation: Run, train: Run) -> LoggedModel | None:
    """Note on an evaluation's row which model it is of; return the model, None where none was logged."""
    weights = evaluation.data.params.get("evaluate.weights")
    model = next((model for model in models_of(client, train) if model.tags[WEIGHTS] == weights), None)
    known = evaluation.inputs.model_inputs if evaluation.inputs else []
    if model and model.model_id not in {found.model_id for found in known}:
        client.log_inputs(evaluation.info.run_id, models=[LoggedModelInput(model.model_id)])
    return model


def save(path: Path, weights: Path, about: WeightsInfo, ids: Mapping[str, str]) -> None:
    """Write a model as MLflow loads it: the weights, the modules that read them, and the packages those need.

    Args:
        path: the folder to make.
        weights: a weights file.
        about: what it says of itself.
        ids: `run_id` and `model_id`, where it is logged.
    """
    with warnings.catch_warnings():  # of types in a module of MLflow's own
        warnings.simplefilter("ignore", UserWarning)
        import mlflow.pyfunc  # late: only a training needs it
    from mlflow.models import Model as MlflowModel

    with tempfile.TemporaryDirectory() as name:
        code = _copy_code(Path(name))
        mlflow.pyfunc.save_model(
            path,
            mlflow_model=MlflowModel(**ids),
            loader_module=_LOADER,
            data_path=str(weights),
            code_paths=[str(code)],
            signature=_signature(about.model.num_classes),
            input_example=_stroke(about.model.image_shape),
            pip_requirements=[f"mlflow=={mlflow.__version__}", *(f"{name}=={version(name)}" for name in _PACKAGES)],
        )


def _log_model(client: MlflowClient, run: Run, name: str, path: Path) -> None:
    try:
        network, _, about = read_weights(path)
    except UserError:  # of older code, whose weights were others: a row, but no model that could be served
        return
    tags = {WEIGHTS: name, _DIGEST: digest(path), "dataset": about.dataset.label, "epoch": str(about.epoch)}
    logged = client.create_logged_model(
        run.info.experiment_id,
        name=f"{about.dataset.name}_{network.config.name}_{name}",
        source_run_id=run.info.run_id,
        tags=tags,
        params=run.data.params,
        model_type="classifier",
    )
    client.set_logged_model_tags(logged.model_id, {NOTE: _how_to_use(logged.model_id, about)})
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "model"
        save(saved, path, about, {"run_id": run.info.run_id, "model_id": logged.model_id})
        client.log_model_artifacts(logged.model_id, str(saved))
    client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
    _name_validation(client, run, logged.model_id, about)
    client.log_outputs(run.info.run_id, [LoggedModelOutput(logged.model_id, step=about.epoch)])


def _how_to_use(model_id: str, about: WeightsInfo) -> str:
    height, width = about.model.image_shape
    return (
        f'`mlflow.pyfunc.load_model("models:/{model_id}").predict(images)` takes an array (images, {height}, {width}), '
        "uint8 or floats from 0 to 1, bright ink on 0, and returns `label` and `probabilities`. "
        f"Weights after epoch {about.epoch}, trained on {about.dataset.label}."
    )


def _name_validation(client: MlflowClient, run: Run, model_id: str, about: WeightsInfo) -> None:
    """Let the validation figures of the weights' epoch, which the row has, stand on the model too."""
    of = {"model_id": model_id, "run_id": run.info.run_id}
    of |= {"dataset_name": about.dataset.name, "dataset_digest": about.dataset.digest[:DIGEST_LENGTH]}
    metrics = [
        Metric(point.key, point.value, point.timestamp, point.step, **of)
        for name in _VALIDATION
        for point in client.get_metric_history(run.info.run_id, name)
        if point.step == about.epoch
    ]
    if metrics:  # the very points of the row, so that it has none of them twice
        client.log_batch(run.info.run_id, metrics=metrics)


def _is_ready(client: MlflowClient, model: LoggedModel) -> bool:
    """Whether a model is whole; one that a killed process began is removed."""
    if model.status != LoggedModelStatus.READY:
        client.delete_logged_model(model.model_id)
        return False
    return True


def _copy_code(to: Path) -> Path:
    """Copy the loader and the modules that it imports; return the folder of the package."""
    root = PACKAGE.parent
    loader = root / Path(*_LOADER.split(".")).with_suffix(".py")
    for name in import_closure(loader, root):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, to / name)
    for folder in (".", "core", "io"):  # without one, a `gradtrail` that is installed would go before
        (to / PACKAGE.name / folder / "__init__.py").touch()
    return to / PACKAGE.name


def _signature(num_classes: int) -> Any:
    """Say what comes out, and that anything may go in: MLflow would refuse all but one type of number, at length."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    label = TensorSpec(np.dtype(np.int64), (-1,), "label")
    probabilities = TensorSpec(np.dtype(np.float32), (-1, num_classes), "probabilities")
    return ModelSignature(Schema([TensorSpec(np.dtype(object), (-1,))]), Schema([label, probabilities]))


def _stroke(shape: tuple[int, int]) -> np.ndarray:
    """Return one image, (1, height, width), uint8: an upright stroke, as of a 1."""
    height, width = shape
    image = np.zeros((1, height, width), np.uint8)
    image[:, height // 5 : -(height // 5), width // 2 - 1 : width // 2 + 1] = 255
    return image
