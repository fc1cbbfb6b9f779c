"""Weights as models of MLflow: which ones, once each, and loaded without this repository."""

import contextlib
import functools
import json
import shutil
import sqlite3
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import jax
import mlflow
import numpy as np
import pytest
from factories import SHAPE, dataset_info, model_config
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus, Metric, Run

from gradtrail.core.nn.models import Model, Params
from gradtrail.stages.artifacts.members import member_folder, write_seeds
from gradtrail.stages.artifacts.weights import WeightsInfo, read_weights, write_weights
from gradtrail.tracking.gc.runs import as_garbage, ownerless_artifacts
from gradtrail.tracking.mlflow.client import experiment_id, open_store
from gradtrail.tracking.mlflow.links import copy_headlines
from gradtrail.tracking.mlflow.models import link_evaluation, log_models, models_of
from gradtrail.tracking.mlflow.naming import NOTE

IMAGES = np.random.default_rng(0).integers(0, 256, (3, *SHAPE), np.uint8)


@pytest.fixture(scope="module")
def client(created_store: Any) -> MlflowClient:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{created_store.folder}/mlflow.db")
        return open_store()


def new_run(client: MlflowClient, **params: str) -> Run:
    experiment = client.get_experiment_by_name("models")
    run_id = client.create_run(experiment.experiment_id, tags={"stage": "evaluate" if params else "train"}).info.run_id
    client.log_param(run_id, "train.seed", "7")
    for key, value in params.items():
        client.log_param(run_id, key.replace("__", "."), value)
    return client.get_run(run_id)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder with final and best weights, and two kept epochs."""
    for epoch, name in enumerate(("final", "best", "epochs/000", "epochs/005")):
        write(tmp_path / "models" / f"{name}.safetensors", epoch)
    return tmp_path / "models"


@functools.cache
def initial_params(seed: int) -> Params:
    return Model(model_config()).init(key=jax.random.key(seed))


def write(path: Path, epoch: int, seed: int | None = None) -> None:
    info = WeightsInfo(model=model_config(), label_smoothing=0.1, dataset=dataset_info(), epoch=epoch)
    write_weights(path, initial_params(epoch if seed is None else seed), info)


def names(client: MlflowClient, run: Run) -> list[str]:
    return sorted(model.tags["weights"] for model in models_of(client, run))


def test_each_model_is_logged_once_and_again_when_its_weights_change(client: MlflowClient, weights: Path) -> None:
    run = new_run(client)
    log_models(client, run, weights, kept_epochs=False)
    assert names(client, run) == ["best", "final"]
    log_models(client, run, weights, kept_epochs=True)
    assert names(client, run) == ["000", "005", "best", "final"]
    write(weights / "best.safetensors", 9)
    log_models(client, run, weights, kept_epochs=False)
    assert names(client, run) == ["000", "005", "best", "best", "final"]
    outputs = client.get_run(run.info.run_id).outputs.model_outputs
    assert {output.model_id for output in outputs} == {model.model_id for model in models_of(client, run)}
    assert all(model.params == {"train.seed": "7"} for model in models_of(client, run))


def test_models_have_the_metrics_of_their_epoch_and_no_point_is_logged_twice(
    client: MlflowClient, weights: Path
) -> None:
    run = new_run(client)
    curve = [Metric("train/validation_accuracy", epoch / 10, 5, epoch) for epoch in range(3)]
    client.log_batch(run.info.run_id, metrics=curve)
    log_models(client, run, weights, kept_epochs=False)
    found = {
        model.tags["weights"]: [(m.key, m.value, m.dataset_name) for m in model.metrics]
        for model in models_of(client, run)
    }
    key = "train/validation_accuracy"
    assert found == {"final": [(key, 0.0, dataset_info().name)], "best": [(key, 0.1, dataset_info().name)]}
    assert len(client.get_metric_history(run.info.run_id, key)) == 3


def test_an_incomplete_model_is_replaced(client: MlflowClient, weights: Path) -> None:
    run = new_run(client)
    tags = {"weights": "final", "weights_digest": "0"}
    begun = client.create_logged_model(run.info.experiment_id, "begun", run.info.run_id, tags)
    log_models(client, run, weights, kept_epochs=False)
    found = list(models_of(client, run))
    assert begun.model_id not in {model.model_id for model in found}
    assert {model.status for model in found} == {LoggedModelStatus.READY}


def test_a_file_that_holds_no_weights_is_skipped(client: MlflowClient, weights: Path) -> None:
    run = new_run(client)
    (weights / "final.safetensors").write_text("words")
    log_models(client, run, weights, kept_epochs=False)
    assert names(client, run) == ["best"]


def test_an_evaluated_model_has_the_metrics_and_is_an_input_of_the_evaluation(
    client: MlflowClient, weights: Path
) -> None:
    run, evaluation = new_run(client), new_run(client, evaluate__weights="best")
    log_models(client, run, weights, kept_epochs=False)
    client.log_batch(evaluation.info.run_id, metrics=[Metric("eval/accuracy", 0.5, 0, 0)])
    for _ in range(2):
        evaluation, run = client.get_run(evaluation.info.run_id), client.get_run(run.info.run_id)
        copy_headlines(client, evaluation, run)
    (model,) = (model for model in models_of(client, run) if model.tags["weights"] == "best")
    assert [(metric.key, metric.value, metric.run_id) for metric in model.metrics] == [
        ("eval/accuracy", 0.5, run.info.run_id)
    ]
    assert link_evaluation(client, evaluation, run).model_id == model.model_id
    assert [found.model_id for found in client.get_run(evaluation.info.run_id).inputs.model_inputs] == [model.model_id]
    assert client.get_run(run.info.run_id).data.metrics == {"eval/accuracy": 0.5}


def test_the_last_headline_is_the_one_that_shows_though_the_clock_was_set_back(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(client)
    for hour, value in enumerate((0.7, 0.6, 0.8)):
        monkeypatch.setattr(time, "time", lambda hour=hour: 1e9 - 3600 * hour)
        evaluation = new_run(client, evaluate__weights="final")
        client.log_batch(evaluation.info.run_id, metrics=[Metric("eval/accuracy", value, 0, 0)])
        evaluation = client.get_run(evaluation.info.run_id)
        assert copy_headlines(client, evaluation, client.get_run(run.info.run_id))
        shown = client.get_run(run.info.run_id)
        assert shown.data.metrics == {"eval/accuracy": value}
        assert not copy_headlines(client, evaluation, shown), "nothing is left to copy"


@pytest.fixture
def ensemble(weights: Path) -> Path:
    """A folder with three members, the second of which was best after another epoch."""
    for seed in (4, 5, 12):
        for name, epoch in (("final", 2), ("best", int(seed == 5)), ("epochs/000", 0)):
            write(member_folder(weights, seed) / f"{name}.safetensors", epoch, seed)
    shutil.copytree(member_folder(weights, 4), weights, dirs_exist_ok=True)
    write_seeds(weights, (4, 5, 12))
    return weights


def test_the_model_of_several_members_is_their_ensemble(client: MlflowClient, ensemble: Path) -> None:
    run = new_run(client)
    client.log_batch(run.info.run_id, metrics=[Metric("train/validation_accuracy", 0.5, 5, epoch) for epoch in (1, 2)])
    for _ in range(2):
        log_models(client, run, ensemble, kept_epochs=False)
    models = {model.tags["weights"]: model for model in models_of(client, run)}
    assert sorted(models) == names(client, run) == ["best", "final"]
    assert {name: model.tags["epoch"] for name, model in models.items()} == {"final": "2", "best": "0, 1"}
    assert [metric.value for metric in models["final"].metrics] == [0.5]
    assert not models["best"].metrics, "its members are not of one epoch"
    assert "Mean probabilities of 3 networks, seeds 4 to 12; weights after epochs 0, 1," in models["best"].tags[NOTE]
    served = mlflow.pyfunc.load_model(models["final"].artifact_location).predict(IMAGES)
    files = (member_folder(ensemble, seed) / "final.safetensors" for seed in (4, 5, 12))
    networks = [(model, jax.device_put(params)) for model, params, _ in map(read_weights, files)]
    own = [np.asarray(jax.nn.softmax(model.apply(params, jax.device_put(IMAGES)))) for model, params in networks]
    np.testing.assert_allclose(served["probabilities"], np.mean(own, axis=0), rtol=1e-4, atol=1e-6)
    write(member_folder(ensemble, 12) / "final.safetensors", 2, seed=99)
    log_models(client, run, ensemble, kept_epochs=False)
    assert names(client, run) == ["best", "final", "final"], "another member is another ensemble"


def expected_labels(path: Path) -> list[int]:
    model, params, _ = read_weights(path)
    return [int(label) for label in np.argmax(model.apply(jax.device_put(params), jax.device_put(IMAGES)), axis=1)]


@pytest.mark.slow
def test_it_is_loaded_without_the_repository_or_a_pickle(client: MlflowClient, weights: Path, tmp_path: Path) -> None:
    run = new_run(client)
    log_models(client, run, weights, kept_epochs=False)
    (model,) = (model for model in models_of(client, run) if model.tags["weights"] == "final")
    np.save(tmp_path / "images.npy", IMAGES)
    code = f"""
import pickle
pickle.load = pickle.loads = None
import mlflow, numpy
model = mlflow.pyfunc.load_model({model.artifact_location!r})
print(model.predict(numpy.load("images.npy"))["label"].tolist())
import gradtrail
print(gradtrail.__file__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    labels, place = done.stdout.splitlines()
    assert json.loads(labels) == expected_labels(weights / "final.safetensors")
    assert place.startswith(model.artifact_location.removeprefix("file://")), "it brings the code that it needs"


@pytest.mark.slow
def test_a_model_is_removed_with_its_run(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = open_store()
    run = client.create_run(experiment_id(client, "models"), tags={"stage": "train", "state": "0" * 64})
    log_models(client, run, weights, kept_epochs=False)
    client.delete_run(run.info.run_id)
    (garbage,) = as_garbage(client, [])
    assert garbage.size_bytes > sum((weights / f"{name}.safetensors").stat().st_size for name in ("final", "best"))
    (tmp_path / "mlruns" / "models" / f"m-{'0' * 32}").mkdir()
    (forgotten,) = ownerless_artifacts()
    for found in (garbage, forgotten):
        found.remove()
    assert list((tmp_path / "mlruns" / "models").iterdir()) == []
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("select count(*) from logged_models").fetchone() == (0,)
        assert store.execute("select count(*) from runs").fetchone() == (0,)


@pytest.mark.nightly
def test_in_a_fresh_environment_with_the_stated_requirements(
    client: MlflowClient, weights: Path, tmp_path: Path
) -> None:
    """`mlflow models predict`, from JSON of whole numbers and of floats; other shapes are refused."""
    run = new_run(client)
    log_models(client, run, weights, kept_epochs=False)
    (model,) = (model for model in models_of(client, run) if model.tags["weights"] == "final")
    place = Path(model.artifact_location.removeprefix("file://"))
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / "bin"
    install = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(place / "requirements.txt"))
    subprocess.run([binaries / "python", *install], check=True, timeout=900)

    def predict(images: np.ndarray) -> subprocess.CompletedProcess[str]:
        (tmp_path / "images.json").write_text(json.dumps({"inputs": images.tolist()}))
        options = ("-m", f"models:/{model.model_id}", "-i", str(tmp_path / "images.json"), "--env-manager", "local")
        env = {"PATH": f"{binaries}:/usr/bin:/bin", "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()}
        env |= {"MLFLOW_DISABLE_TELEMETRY": "true", "HOME": str(tmp_path)}
        command = [binaries / "mlflow", "models", "predict", *options]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300)

    for images in (IMAGES, IMAGES / 255):
        done = predict(images)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])["predictions"]
        assert answer["label"] == expected_labels(weights / "final.safetensors")
        np.testing.assert_allclose(np.sum(answer["probabilities"], axis=1), 1, rtol=1e-5)
    refused = predict(IMAGES[0])
    assert refused.returncode != 0
    assert f"got shape {SHAPE}" in refused.stderr
