"""Which locations of artifacts are relocated, and which are not. Whole projects: `tests/contracts/runs`."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gradtrail.tracking.relocate import former_folders, relocate_artifacts
from gradtrail.tracking.tags import EXPERIMENT

TABLES = """
create table experiments (experiment_id integer, name text, artifact_location text);
create table experiment_tags (experiment_id integer, key text, value text);
create table runs (run_uuid text, artifact_uri text);
create table logged_models (model_id text, artifact_location text);
create table model_versions (name text, source text, storage_location text);
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A project whose database has two runs."""
    old = tmp_path / "old"
    (old / "mlruns/1/artifacts").mkdir(parents=True)
    with closing(sqlite3.connect(old / "mlflow.db")) as store, store:
        store.executescript(TABLES)
        folder = (old / "mlruns").as_uri()
        experiments = [(0, "Default", f"{old}/mlruns/0"), (2, "models", folder), (3, "other", "file:///x/mlruns")]
        store.executemany("insert into experiments values (?, ?, ?)", experiments)
        store.execute("insert into experiment_tags values (2, ?, 'models')", (EXPERIMENT,))
        add(store, {"1": f"{folder}/1/artifacts", "2": f"{folder}/2/artifacts"})
        store.execute("insert into model_versions values ('m', 'models:/m-1', ?)", (f"{folder}/models/m-1",))
    return old


@pytest.fixture
def new(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the working folder."""
    new = Path(shutil.copytree(old, tmp_path / "a new ü"))
    monkeypatch.setenv("DVC_ROOT", str(new))
    monkeypatch.chdir(new)
    return new


def add(store: sqlite3.Connection, runs: dict[str, str]) -> None:
    store.executemany("insert into runs values (?, ?)", runs.items())


def uri(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def locations(folder: Path) -> dict[str, str]:
    queries = ("run_uuid, artifact_uri from runs", "name, artifact_location from experiments", "* from model_versions")
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:
        rows = [row for query in queries for row in store.execute(f"select {query}")]
    return {row[0]: row[-1] for row in rows}


def test_locations_name_the_new_place_and_those_of_others_stay(
    old: Path, new: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unrelated = {
        "bucket": "s3://bucket/mlruns/1/artifacts",
        "server": "mlflow-artifacts:/1/artifacts",
        "longer": f"file://{old}/mlruns2/1/artifacts",
        "host": f"file://elsewhere{old}/mlruns/1/artifacts",
    }
    with closing(sqlite3.connect(new / "mlflow.db")) as store, store:
        add(store, unrelated | {"plain": f"{old}/mlruns/3/c d/artifacts"})
    before = (old / "mlflow.db").read_bytes()
    assert former_folders(uri(new))
    relocate_artifacts(uri(new))
    folder = (new / "mlruns").as_uri()
    assert locations(new) == unrelated | {
        "1": f"{folder}/1/artifacts",
        "2": f"{folder}/2/artifacts",
        "plain": f"{new}/mlruns/3/c d/artifacts",
        "m": f"{folder}/models/m-1",
        "Default": f"{new}/mlruns/0",
        "models": folder,
        "other": "file:///x/mlruns",
    }
    assert capsys.readouterr().err == f"moved or copied from {old}: the artifacts in MLflow now name {new}\n"
    assert not former_folders(uri(new))
    assert (old / "mlflow.db").read_bytes() == before


def test_a_database_without_its_artifacts_is_not_changed_while_they_are_elsewhere(
    old: Path, new: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = locations(new)
    shutil.rmtree(new / "mlruns/1")
    relocate_artifacts(uri(new))
    (message,) = capsys.readouterr().err.splitlines()
    assert f"which are still in {old}/mlruns; copy them to {new}/mlruns" in message
    assert locations(new) == before
    shutil.rmtree(old)
    relocate_artifacts(uri(new))
    assert not former_folders(uri(new))


def test_link_to_the_same_folder_is_not_a_move(old: Path, new: Path) -> None:
    shutil.rmtree(new / "mlruns")
    (new / "mlruns").symlink_to(old / "mlruns")
    assert not former_folders(uri(new))
