"""Which locations of artifacts are relocated, and which are not. Whole projects: `tests/contracts/runs`."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gradtrail.tracking.mlflow import relocate
from gradtrail.tracking.mlflow.relocate import is_moved, relocate_artifacts

TABLES = """
create table experiments (experiment_id integer, name text, artifact_location text);
create table runs (run_uuid text, artifact_uri text);
create table model_versions (name text, source text, storage_location text);
create table trace_tags (key text, value text);
create table experiment_tags (experiment_id integer, key text, value text)
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A project whose database has two runs."""
    old = tmp_path / "old"
    (old / "mlruns/1/artifacts").mkdir(parents=True)
    with closing(sqlite3.connect(old / "mlflow.db")) as store, store:
        store.executescript(TABLES)
        ours = (old / "mlruns").as_uri()
        made = [(0, "Default", f"{old}/mlruns/0"), (1, "data", ours), (2, "models", ours), (3, "own", "s3://bucket")]
        store.executemany("insert into experiments values (?, ?, ?)", made)
        add(store, {"1": f"{ours}/1/artifacts", "2": f"{ours}/2/artifacts"})
    return old


@pytest.fixture
def new(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the working folder."""
    new = Path(shutil.copytree(old, tmp_path / "a new ü"))
    monkeypatch.setenv("DVC_ROOT", str(new))
    monkeypatch.chdir(new)
    relocate._warn_of_missing.cache_clear()
    return new


def add(store: sqlite3.Connection, runs: dict[str, str]) -> None:
    store.executemany("insert into runs values (?, ?)", runs.items())


def uri(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def locations(folder: Path) -> dict[str, str]:
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:
        runs = store.execute("select run_uuid, artifact_uri from runs").fetchall()
        return dict(runs + store.execute("select name, artifact_location from experiments").fetchall())


def test_locations_name_the_new_place(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (old / "mlflow.db").read_bytes()
    assert is_moved(uri(new))
    assert is_moved("sqlite:///mlflow.db")
    relocate_artifacts(uri(new))
    ours = (new / "mlruns").as_uri()
    runs = {"1": f"{ours}/1/artifacts", "2": f"{ours}/2/artifacts"}
    assert locations(new) == runs | {
        "Default": f"{new}/mlruns/0",
        "data": ours,
        "models": ours,
        "own": "s3://bucket",
    }
    assert capsys.readouterr().err == f"moved or copied from {old}: the artifacts of 2 runs in MLflow now name {new}\n"
    assert not is_moved(uri(new))
    assert (old / "mlflow.db").read_bytes() == before


def test_locations_of_others_stay(old: Path, new: Path) -> None:
    unrelated = {
        "bucket": "s3://bucket/mlruns/1/artifacts",
        "server": "mlflow-artifacts:/1/artifacts",
        "longer": f"file://{old}/mlruns2/1/artifacts",
        "above": f"file://{old}/artifacts",
        "host": f"file://elsewhere{old}/mlruns/1/artifacts",
    }
    ours = {"quoted": f"file://{old}/mlruns/a%20b%23/artifacts", "plain": f"{old}/mlruns/3/c d/artifacts"}
    place = (new / "mlruns").as_uri()
    expected = {"quoted": f"{place}/a%20b%23/artifacts", "plain": f"{new}/mlruns/3/c d/artifacts"}
    with closing(sqlite3.connect(new / "mlflow.db")) as store, store:
        add(store, unrelated | ours)
        store.execute("insert into model_versions values ('m', 'models:/m-1', ?)", (f"file://{old}/mlruns/models/m-1",))
        tags = {"mlflow.artifactLocation": f"{old}/mlruns/3/traces", "said": f"{old}/mlruns/3"}
        store.executemany("insert into trace_tags values (?, ?)", tags.items())
    relocate_artifacts(uri(new))
    assert (unrelated | expected).items() <= locations(new).items()
    with closing(sqlite3.connect(new / "mlflow.db")) as store:
        assert store.execute("select * from model_versions").fetchall() == [("m", "models:/m-1", f"{place}/models/m-1")]
        tags["mlflow.artifactLocation"] = f"{new}/mlruns/3/traces"
        assert dict(store.execute("select * from trace_tags")) == tags


def test_a_database_without_its_artifacts_is_not_changed(
    old: Path, new: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = locations(new)
    shutil.rmtree(new / "mlruns")
    relocate_artifacts(uri(new))
    message = capsys.readouterr().err
    assert f"which are still in {old}/mlruns; copy them to {new}/mlruns" in message
    assert message.count("\n") == 1
    assert locations(new) == before
    shutil.copytree(old / "mlruns", new / "mlruns")
    relocate_artifacts(uri(new))
    assert not is_moved(uri(new))


def test_database_without_any_artifacts_is_relocated(old: Path, new: Path) -> None:
    shutil.rmtree(old)
    shutil.rmtree(new / "mlruns")
    relocate_artifacts(uri(new))
    assert not is_moved(uri(new))


def test_link_to_the_same_folder_is_not_a_move(old: Path, new: Path) -> None:
    shutil.rmtree(new / "mlruns")
    (new / "mlruns").symlink_to(old / "mlruns")
    assert not is_moved(uri(new))


def test_fault_while_relocating_changes_nothing(new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, relocated, calls = locations(new), relocate._relocated, []

    def break_down(location: str, former: Path) -> str:
        calls.append(location)
        if len(calls) > 4:
            raise OSError("broken")
        return relocated(location, former)

    monkeypatch.setattr(relocate, "_relocated", break_down)
    with pytest.raises(OSError, match="broken"):
        relocate_artifacts(uri(new))
    assert locations(new) == before
