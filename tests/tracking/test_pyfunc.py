"""Exports as models of MLflow: tied to training and evaluation, loaded without this repository; their answers."""

import contextlib
import json
import shutil
import socket
import sqlite3
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grimp
import mlflow
import numpy as np
import pytest
from exports import SHAPE, write_small_export, write_wrong_export
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelStatus, Metric, Param, Run
from mlflow.exceptions import MlflowException

from gradtrail.stages.common.files import digest
from gradtrail.stages.model.exported import read_export, read_manifest
from gradtrail.tracking.dvc_history import RecordedStates
from gradtrail.tracking.gc import purge, unneeded_runs
from gradtrail.tracking.links import copy_headlines
from gradtrail.tracking.models import (
    LOADED,
    log_evaluation,
    log_export,
    logged_exports,
    models_of,
    registered_models,
)
from gradtrail.tracking.pyfunc import ServedModel, _load_pyfunc
from gradtrail.tracking.runs import RunIndex
from gradtrail.tracking.ship import remove_run
from gradtrail.tracking.state import Snapshot
from gradtrail.tracking.store import experiment_id, open_store
from gradtrail.tracking.tags import (
    CLONE,
    EXPORT_DIGEST,
    EXPORT_OUT,
    MODEL_WEIGHTS,
    NOTE,
    PROCESS,
    clone_id,
    process_tags,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (70, *SHAPE), np.uint8)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = write_small_export(tmp_path_factory.mktemp("exported") / "export", model="linear", batch_sizes=(1, 32))
    return _load_pyfunc(str(folder))


def test_unusable_exports_are_refused_in_one_line(tmp_path: Path) -> None:
    damaged = write_small_export(tmp_path / "damaged", model="linear")
    (damaged / "weights.safetensors").write_bytes(b"words")
    with pytest.raises(MlflowException, match="damaged: its SHA-256 is not that of"):
        _load_pyfunc(str(damaged))
    wrong = _load_pyfunc(str(write_wrong_export(tmp_path / "wrong", answers="NaN")))
    with pytest.raises(MlflowException, match="digits: its answers to 3 of 3 images are not probabilities"):
        wrong.predict(PIXELS[:3])


@pytest.mark.parametrize(
    "same",
    [
        PIXELS[:1].astype(np.int64),
        PIXELS[:1].astype(object),
        (PIXELS[:1] / 255).astype(np.float32),
        (PIXELS[:1] / 255).tolist(),
        PIXELS[0].tolist(),
    ],
)
def test_integers_and_floats_in_arrays_and_lists_are_the_same_image(served: ServedModel, same: Any) -> None:
    expected = served.predict(PIXELS[:1])["probabilities"]
    np.testing.assert_array_equal(served.predict(same)["probabilities"], expected)


@pytest.mark.parametrize(
    ("data", "actual"),
    [
        (PIXELS[0, 0], f"shape {SHAPE[1:]}"),
        (PIXELS[:2, :-1], f"shape (2, {SHAPE[0] - 1}, {SHAPE[1]})"),
        (PIXELS[:2, ..., None], f"shape (2, {SHAPE[0]}, {SHAPE[1]}, 1)"),
        ([[1, 2], [3]], "rows or images of different lengths"),
        (PIXELS[:1].astype(str), "values of type <U3"),
        (np.full((1, *SHAPE), 256), "int64 from 256 to 256"),
        (np.full((1, *SHAPE), 255.0), "float64 from 255 to 255"),
        (np.full((1, *SHAPE), np.nan), "float64 from nan to nan"),
        (np.eye(*SHAPE, dtype=int).tolist(), "int64 that are all 0 or 1, which may be either"),
        (None, "shape ()"),
    ],
)
def test_other_input_is_refused_in_one_line(served: ServedModel, data: Any, actual: str) -> None:
    with pytest.raises(MlflowException) as caught:
        served.predict(data)
    assert str(caught.value).startswith(f"images: an array (images, {SHAPE[0]}, {SHAPE[1]}) of whole numbers")
    assert str(caught.value).endswith(f"; got {actual}")
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"


IMAGES = PIXELS[:3]
TEMPERATURE = 1.5  # of the small exports


@pytest.fixture(scope="module")
def client(created_store: Path, tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    database = Path(shutil.copy(created_store / "mlflow.db", tmp_path_factory.mktemp("own")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
        return open_store()


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_export(tmp_path_factory.mktemp("models") / "export", model="linear", batch_sizes=(4,))


def new_run(client: MlflowClient, stage: str = "train", params: Mapping[str, str] = {"train.seed": "7"}) -> Run:
    tags = {"stage": stage, "state": "0" * 64, CLONE: clone_id()}
    run_id = client.create_run(experiment_id(client, "models"), tags=tags).info.run_id
    client.log_batch(run_id, params=[Param(*item) for item in params.items()])
    client.set_terminated(run_id, end_time=1)
    return client.get_run(run_id)


def new_evaluation(client: MlflowClient, weights: str = "final", **metrics: float) -> Run:
    run = new_run(client, "evaluate", {"evaluate.weights": weights})
    points = {"temperature": TEMPERATURE} | metrics
    client.log_batch(run.info.run_id, metrics=[Metric(f"eval/{name}", value, 0, 0) for name, value in points.items()])
    return client.get_run(run.info.run_id)


def model_of(client: MlflowClient, run: Run) -> LoggedModel:
    (model,) = models_of(client, run)
    return model


def test_export_is_logged_once_and_another_one_separately(client: MlflowClient, export: Path, tmp_path: Path) -> None:
    run = new_run(client)
    for _ in range(2):
        log_export(client, run, export)
    model = model_of(client, run)
    assert (model.status, model.source_run_id) == (LoggedModelStatus.READY, run.info.run_id)
    assert model.params == {"train.seed": "7"}
    assert model.tags[EXPORT_DIGEST] == read_manifest(export).digest
    outputs = client.get_run(run.info.run_id).outputs.model_outputs
    assert [output.model_id for output in outputs] == [model.model_id]
    assert digest(Path(model.artifact_location.removeprefix("file://")) / "data" / "export") == digest(export)
    assert run.info.run_id in {logged.source_run_id for logged in logged_exports(client)}
    other = write_small_export(tmp_path / "other", model="linear", weights="best")
    log_export(client, run, other)
    assert {logged.tags[MODEL_WEIGHTS] for logged in models_of(client, run)} == {"final", "best"}


def test_an_incomplete_model_is_replaced_once_its_process_has_ended(client: MlflowClient, export: Path) -> None:
    run = new_run(client)
    tags = {MODEL_WEIGHTS: "final", EXPORT_DIGEST: read_manifest(export).digest, EXPORT_OUT: digest(export)}
    uploading = client.create_logged_model(run.info.experiment_id, "begun", run.info.run_id, tags | process_tags())
    log_export(client, run, export)
    assert model_of(client, run).model_id == uploading.model_id, "the process that uploads it is alive"
    client.delete_logged_model(uploading.model_id)
    tags[PROCESS] = f"{socket.gethostname()}:1:of an earlier boot"
    unfinished = client.create_logged_model(run.info.experiment_id, "begun", run.info.run_id, tags)
    assert run.info.run_id not in {logged.source_run_id for logged in logged_exports(client)}
    log_export(client, run, export)
    model = model_of(client, run)
    assert model.model_id != unfinished.model_id
    assert model.status == LoggedModelStatus.READY


@pytest.mark.parametrize("is_logged_first", [True, False])
def test_an_evaluated_model_has_the_metrics_and_is_an_input_of_the_evaluation(
    client: MlflowClient, export: Path, *, is_logged_first: bool
) -> None:
    """Whether the model was there before the evaluation's metrics were copied, or came after."""
    run, evaluation = new_run(client), new_evaluation(client, accuracy=0.5)
    other = new_evaluation(client, weights="best", accuracy=0.4), new_evaluation(client, temperature=2.0, accuracy=0.3)
    if is_logged_first:
        log_export(client, run, export)
    copy_headlines(client, evaluation, run)
    if not is_logged_first:
        log_export(client, run, export)
    for _ in range(2):
        copy_headlines(client, RunIndex(client)[evaluation.info.run_id], client.get_run(run.info.run_id))
    model = model_of(client, run)
    metrics = [(metric.key, metric.value, metric.run_id) for metric in model.metrics]
    assert metrics == [("eval/accuracy", 0.5, run.info.run_id)]
    evaluation = client.get_run(evaluation.info.run_id)
    assert [item.model_id for item in evaluation.inputs.model_inputs] == [model.model_id]
    assert client.get_run(run.info.run_id).data.metrics == {"eval/accuracy": 0.5}
    assert len(client.get_metric_history(run.info.run_id, "eval/accuracy")) == 1
    for one in other:
        log_evaluation(client, one, run, one.data.metrics)
        assert not client.get_run(one.info.run_id).inputs.model_inputs


def test_the_model_of_several_members_is_their_ensemble(client: MlflowClient, tmp_path: Path) -> None:
    folder = write_small_export(tmp_path / "export", seed=4, members=3, model="linear", epochs=(0, 1, 1))
    run = new_run(client)
    log_export(client, run, folder)
    model = model_of(client, run)
    assert "Weights of seeds 4 to 6 after epoch 0, 1, trained on" in model.tags[NOTE]
    served = mlflow.pyfunc.load_model(model.artifact_location).predict(IMAGES)
    np.testing.assert_array_equal(served["probabilities"], read_export(folder).predict(IMAGES))


def test_the_code_of_a_model_is_what_its_loader_imports() -> None:
    graph = grimp.build_graph("gradtrail", exclude_type_checking_imports=True, cache_dir=None)
    loader, *imported = LOADED
    assert {loader, *imported} == {loader, *graph.find_upstream_modules(loader)}


@pytest.mark.slow
def test_model_loads_without_the_repository_pickle_and_flax(client: MlflowClient, export: Path, tmp_path: Path) -> None:
    run = new_run(client)
    log_export(client, run, export)
    model = model_of(client, run)
    np.save(tmp_path / "images.npy", IMAGES)
    code = f"""
import pickle, sys
pickle.load = pickle.loads = None
sys.modules["flax"] = None
import mlflow, numpy
model = mlflow.pyfunc.load_model({model.artifact_location!r})
print(model.predict(numpy.load("images.npy"))["label"].tolist())
import gradtrail
print(gradtrail.__file__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    labels, place = done.stdout.splitlines()
    assert json.loads(labels) == expected_labels(export)
    assert place.startswith(model.artifact_location.removeprefix("file://")), "it brings the code that it needs"


def expected_labels(export: Path) -> list[int]:
    return [int(label) for label in read_export(export).predict(IMAGES).argmax(axis=1)]


@pytest.fixture
def own_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """A store in the root of a project."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return open_store()


def pass_days_since_deletion(root: Path, days: int) -> None:
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as store, store:
        store.execute("update runs set deleted_time = deleted_time - ?", (days * 86_400_000,))


@pytest.mark.slow
def test_a_model_is_removed_with_its_run_unless_it_is_registered(
    own_client: MlflowClient, export: Path, tmp_path: Path
) -> None:
    """Neither as a run of no recorded state, nor when it is deleted because another run has its place."""
    registered, other = new_run(own_client), new_run(own_client)
    for run in (registered, other):
        log_export(own_client, run, export)
    model = model_of(own_client, registered)
    own_client.create_registered_model("digits")
    own_client.create_model_version("digits", f"models:/{model.model_id}", model_id=model.model_id)
    assert registered_models(own_client) == {model.model_id, registered.info.run_id}

    recorded = RecordedStates(snapshots=[Snapshot(pipeline={}, lock={})], num_unreadable=0)
    assert [run.info.run_id for run in unneeded_runs(own_client, recorded)] == [other.info.run_id]
    assert [remove_run(own_client, run.info.run_id, by="") for run in (registered, other)] == [False, True]
    assert unneeded_runs(own_client, recorded) == [], "30 days count from the deletion"
    pass_days_since_deletion(tmp_path, 31)
    unneeded = unneeded_runs(own_client, recorded)
    assert [run.info.run_id for run in unneeded] == [other.info.run_id]
    unrelated = own_client.create_logged_model("0", "of somebody else")
    own_client.delete_logged_model(unrelated.model_id)
    purge(own_client, unneeded)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("select run_uuid from runs").fetchall() == [(registered.info.run_id,)]
        remaining_models = {model_id for (model_id,) in store.execute("select model_id from logged_models")}
        assert remaining_models == {model.model_id, unrelated.model_id}, "what others deleted is theirs to purge"
    (version,) = own_client.search_model_versions()
    assert mlflow.pyfunc.load_model(f"models:/{version.name}/{version.version}").predict(IMAGES)["label"].shape == (3,)


@pytest.mark.nightly
def test_model_predicts_in_a_fresh_environment(client: MlflowClient, export: Path, tmp_path: Path) -> None:
    """`mlflow models predict`, from JSON of whole numbers and of floats; other shapes are refused."""
    run = new_run(client)
    log_export(client, run, export)
    model = model_of(client, run)
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
        assert answer["label"] == expected_labels(export)
        np.testing.assert_allclose(np.sum(answer["probabilities"], axis=1), 1, rtol=1e-5)
    refused = predict(IMAGES[:, 0])
    assert refused.returncode != 0
    assert f"got shape {(3, SHAPE[1])}" in refused.stderr
