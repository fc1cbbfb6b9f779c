"""The export of a model URI, and the errors of an invalid one."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient
from model_store import log_export, training

from gradtrail.serving.registry import Reference, RegistryUnavailable, registered_name, remember, resolve, version_of
from gradtrail.stages.model.exported import read_export, read_manifest
from gradtrail.support.errors import UserError

CACHE = Path(".gradtrail/exports")


@pytest.fixture
def export(client: MlflowClient, exported: Callable[[int], Path]) -> Path:
    return exported(0)


def register(client: MlflowClient, export: Path, seed: int = 0) -> str:
    """Register an export as the next version of `digits`; return the id of its model."""
    run = training(client, seed=seed, export=None)
    model_id = log_export(client, run, export)
    client.create_model_version("digits", f"models:/{model_id}", run_id=run.info.run_id, model_id=model_id)
    return model_id


@pytest.fixture
def registered(client: MlflowClient, export: Path) -> str:
    """A version 1 of `digits` with the alias champion; returns the id of its model."""
    client.create_registered_model("digits")
    model_id = register(client, export)
    client.set_registered_model_alias("digits", "champion", "1")
    return model_id


def test_every_form_of_a_uri_resolves_to_the_same_export(registered: str, export: Path):
    digest = read_manifest(export).digest
    for uri, version in (("digits@champion", "1"), ("digits/1", "1"), (registered, None)):
        reference = resolve(f"models:/{uri}")
        assert (reference.digest, reference.folder, reference.version) == (digest, CACHE / digest, version)
        assert reference.run_id
        assert read_export(reference.folder).manifest == read_manifest(export)
    assert [path.name for path in CACHE.iterdir() if path.name != "last"] == [digest]  # nothing half-made


def test_folder_needs_no_store(export: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    reference = Reference(name="digits", version=None, run_id=None, digest=read_manifest(export).digest, folder=export)
    assert resolve(str(export)) == reference
    shutil.copytree(export, "downloaded/data/export")  # as MLflow lays a logged model out
    assert resolve("downloaded").digest == reference.digest


@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json"])
def test_cached_export_is_reused_and_a_damaged_one_downloaded_again(registered: str, name: str):
    first = resolve("models:/digits@champion")
    before = first.folder.stat().st_ino
    assert resolve("models:/digits@champion").folder.stat().st_ino == before
    file = first.folder / name
    file.write_bytes(file.read_bytes().replace(b"digits", b"letter") if name == "manifest.json" else b"no weights")
    again = resolve("models:/digits@champion")
    assert read_export(again.folder).manifest.name == "digits"
    assert again.folder.stat().st_ino != before


def test_unavailable_store_uses_the_version_that_was_resolved_or_followed_last(
    registered: str,
    client: MlflowClient,
    exported: Callable[[int], Path],
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
):
    reference = resolve("models:/digits@champion")
    register(client, exported(1), seed=1)
    remember("models:/digits@champion", "models:/digits/2")  # never resolved
    followed = resolve("models:/digits/2")
    damage(tmp_path)
    with pytest.raises(RegistryUnavailable):
        version_of("digits", "champion")
    assert resolve("models:/digits@champion") == reference
    assert "warning: MLflow's registry does not respond" in capsys.readouterr().err
    with pytest.raises(RegistryUnavailable):
        resolve("models:/digits/1")  # never resolved
    remember("models:/digits@champion", "models:/digits/2")
    assert resolve("models:/digits@champion") == followed


def test_damaged_download_is_removed_and_the_last_resolution_kept(
    registered: str, exported: Callable[[int], Path], client: MlflowClient, tmp_path: Path
):
    reference = resolve("models:/digits@champion")
    location = client.get_logged_model(register(client, exported(1), seed=1)).artifact_location
    client.set_registered_model_alias("digits", "champion", "2")
    (weights,) = Path(location.removeprefix("file://")).rglob("weights.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"the download failed or is damaged: .*weights\.safetensors: damaged"):
        resolve("models:/digits@champion")
    shutil.rmtree(weights.parent)
    with pytest.raises(UserError, match="the download failed or is damaged"):
        resolve("models:/digits@champion")
    shutil.copytree(exported(2), weights.parent)
    with pytest.raises(UserError, match="its manifest is not the one with the digest"):
        resolve("models:/digits@champion")
    assert {path.name for path in CACHE.iterdir()} == {"last", reference.digest}
    damage(tmp_path)
    assert resolve("models:/digits@champion") == reference


def test_uri_without_an_export_is_one_line(client: MlflowClient, registered: str):
    run = training(client, seed=5)
    logged = client.create_logged_model(run.info.experiment_id, name="weights", source_run_id=run.info.run_id)
    client.set_logged_model_tags(registered, {"export_digest": "../../escaped"})
    messages = {
        "models:/digits@best": "not in MLflow's store: Registered model alias best",
        "models:/digits/2": "not in MLflow's store: Model Version",
        "models:/digits": "must be models:/NAME@ALIAS",
        f"models:/m-{'0' * 32}": "not in MLflow's store",
        "nowhere": "nowhere: no exported model here",
        f"models:/{logged.model_id}": "has no export",
        "models:/digits@champion": "no SHA-256",
    }
    for uri, message in messages.items():
        with pytest.raises(UserError, match=message) as error:
            resolve(uri)
        assert not isinstance(error.value, RegistryUnavailable)
        assert "\n" not in str(error.value)


def test_registered_name_comes_from_the_params(tmp_path: Path):
    path = tmp_path / "p.yaml"
    path.write_text("export:\n  name: letters\n  batch_sizes: [1]\n")
    assert registered_name(path) == "letters"
    path.write_text("train: {}\n")
    with pytest.raises(UserError, match=r"export\.name is missing"):
        registered_name(path)


def damage(folder: Path) -> None:
    """Drop the tables of the registry, as in a database that is being restored."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as store, store:
        for table in ("registered_model_aliases", "model_version_tags", "model_versions"):
            store.execute(f"drop table {table}")
