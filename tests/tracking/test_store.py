"""One store for many processes, whose conflicting requests are repeated; its artifacts and tables."""

import contextlib
import json
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, INTERNAL_ERROR
from projects import ROOT, create_store

from gradtrail.stages.common.params import PARAMS
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError
from gradtrail.tracking.artifacts import download
from gradtrail.tracking.store import StoreClient, experiment_id, open_store
from gradtrail.tracking.tags import experiment_name


@pytest.mark.slow
def test_processes_that_create_the_store_at_once_agree(tmp_path: Path) -> None:
    processes = create_store(tmp_path, at_once=2)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        query = "select experiment_id, artifact_location from experiments where name = 'models'"
        ((experiment, location),) = store.execute(query).fetchall()
    assert processes == [(0, f"{experiment}\n".encode())] * 2
    assert location == (tmp_path / "mlruns").as_uri()


@pytest.mark.parametrize(
    ("code", "refusals", "calls"),
    [(BAD_REQUEST, 0, 1), (BAD_REQUEST, 1, 2), (BAD_REQUEST, 9, 2), (INTERNAL_ERROR, 1, 1)],
)
def test_a_request_that_conflicts_with_another_is_repeated(
    code: int, refusals: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = StoreClient("http://127.0.0.1:9")
    made: list[str] = []

    def log_batch(run_id: str, metrics: Any, params: Any, tags: Any, synchronous: bool) -> None:
        made.append(run_id)
        if len(made) <= refusals:
            raise MlflowException("conflict", error_code=code)

    monkeypatch.setattr(client._tracking_client, "log_batch", log_batch)
    stands = contextlib.nullcontext() if refusals < calls else pytest.raises(MlflowException, match="conflict")
    with stands:
        client.log_batch("run", tags=[])
    assert made == ["run"] * calls


@pytest.fixture
def database(created_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the store's database, which `open_store` opens."""
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Path(shutil.copy(created_store / "mlflow.db", tmp_path))


def test_database_of_another_mlflow_is_refused_in_one_line(database: Path) -> None:
    with contextlib.closing(sqlite3.connect(database)) as store, store:
        store.execute("update alembic_version set version_num = '451aebb31d03'")
    with pytest.raises(UserError, match=f"^{re.escape(str(database))}: made by another MLflow than .*`mlflow db "):
        open_store()


@pytest.fixture
def client(database: Path) -> MlflowClient:
    return open_store()


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set `runtime.experiment` in a working folder without git."""
    monkeypatch.chdir(tmp_path)

    def name(text: str) -> None:
        params = read_yaml(ROOT / PARAMS)
        params["runtime"]["experiment"] = text
        PARAMS.write_text(json.dumps(params))

    name("")
    return name


def test_experiment_of_somebody_else_is_refused_in_one_line(client: MlflowClient, named: Callable[[str], None]) -> None:
    client.create_experiment("digits-models")
    named("digits")
    error = "^MLflow's experiment 'digits-models' is not of this project; `runtime.experiment` in params.yaml [^\n]+$"
    with pytest.raises(UserError, match=error):
        experiment_id(client, "models")
    named("more-digits")
    experiment = client.get_experiment(experiment_id(client, "models"))
    assert experiment.name == experiment.tags["gradtrail.experiment"] == "more-digits-models"
    named("")
    assert client.get_experiment(experiment_id(client, "models")).name == "models"
    named("it's")
    with pytest.raises(UserError, match=r"^params\.yaml: runtime\.experiment must consist of letters"):
        experiment_id(client, "models")


@pytest.mark.parametrize(
    ("origin", "project"),
    [
        ("", "my project"),  # the name of the root
        ("git@host:people/first.git", "first"),
        ("https://somebody:secret@host/people/first/", "first"),
        ("/srv/git/a b.git", "a-b"),
    ],
)
def test_server_has_experiments_of_several_projects(
    origin: str, project: str, named: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root := tmp_path / project).mkdir()
    monkeypatch.setenv("DVC_ROOT", str(root))
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    if origin:
        subprocess.run(["git", "-C", str(root), "config", "remote.origin.url", origin], check=True)
    assert experiment_name("models", "http://host") == f"{project.replace(' ', '-')}-models"
    assert experiment_name("models", "sqlite:////tmp/mlflow.db") == "models"
    named("mine")
    assert experiment_name("data", "http://host") == "mine-data"


def test_renamed_experiment_is_found_and_a_deleted_one_named_with_the_remedy(client: MlflowClient) -> None:
    experiment = experiment_id(client, "models")
    client.delete_experiment(experiment)
    remedy = f"`mlflow experiments restore --experiment-id {experiment}` restores it with its runs"
    with pytest.raises(UserError, match=f"^MLflow's experiment 'models' was deleted; {remedy}$"):
        experiment_id(client, "models")
    client.restore_experiment(experiment)
    assert experiment_id(client, "models") == experiment
    client.rename_experiment(experiment, "trainings of 2026")
    client.create_experiment("models")
    assert experiment_id(client, "models") == experiment


def test_missing_artifact_is_none_and_a_failing_store_an_error(client: MlflowClient, tmp_path: Path) -> None:
    run_id = client.create_run("0").info.run_id
    client.log_text(run_id, "words", "results/a.txt")
    downloaded = download(client, run_id, "results/a.txt", tmp_path)
    assert downloaded is not None
    assert downloaded.read_text() == "words"
    for path in ("results/b.txt", "a.txt", "none/a.txt"):
        assert download(client, run_id, path, tmp_path) is None
    with pytest.raises(MlflowException, match="not found"):
        download(client, "0" * 32, "a.txt", tmp_path)
