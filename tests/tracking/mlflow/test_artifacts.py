"""Tables of a stage that a run is made from, and artifacts that are downloaded."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from gradtrail.support.errors import UserError
from gradtrail.tracking.mlflow.artifacts import announce_tables, download, read_curves

EPOCHS = "epoch,loss\n1,2.5\n2,1.5\n"


@pytest.fixture
def client(created_store: Any) -> MlflowClient:
    return MlflowClient(f"sqlite:///{created_store.folder}/mlflow.db")


def test_artifact_is_downloaded_and_a_missing_one_is_none(client: MlflowClient, tmp_path: Path) -> None:
    run_id = client.create_run("0").info.run_id
    client.log_text(run_id, "words", "results/a.txt")
    downloaded = download(client, run_id, "results/a.txt", tmp_path)
    assert downloaded is not None
    assert downloaded.read_text() == "words"
    for path in ("results/b.txt", "a.txt", "none/a.txt"):
        assert download(client, run_id, path, tmp_path) is None


def test_failing_store_is_not_a_missing_artifact(client: MlflowClient, tmp_path: Path) -> None:
    with pytest.raises(MlflowException, match="not found"):
        download(client, "0" * 32, "a.txt", tmp_path)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder with the tables of a training."""
    (tmp_path / "epochs.csv").write_text(EPOCHS)
    pd.DataFrame({"step": range(1, 9), "loss": [0.5] * 8}).to_parquet(tmp_path / "steps.parquet", index=False)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("epochs.csv", "era,loss\n1,2.5\n", "it has no column 'epoch'"),
        ("epochs.csv", "epoch,loss\n1,much\n", "column 'loss' is of "),
        ("steps.parquet", "PAR1", ""),
    ],
)
def test_table_of_another_version_is_refused_in_one_line(file: str, text: str, reason: str, tables: Path) -> None:
    (tables / file).write_text(text)
    with pytest.raises(UserError, match=f"^{tables}/{file}: not a table of this project: {reason}") as caught:
        read_curves(tables, "train", {"planned_steps": 6})
    assert "\n" not in str(caught.value)


def test_curve_of_one_member_does_not_replace_epsilon_of_all(tables: Path) -> None:
    (tables / "epochs.csv").write_text("epoch,epsilon\n1,0.5\n")
    metrics = {"planned_steps": 6, "epsilon": 0.5}
    alone = read_curves(tables, "train", metrics)
    assert alone["train/epsilon"] == {1: 0.5}
    several = read_curves(tables, "train", metrics | {"epsilon": 0.9, "epsilon_each": 0.5})
    assert several == {"train/epsilon_each" if name == "train/epsilon" else name: alone[name] for name in alone}


@pytest.mark.parametrize("tag", ["", "no JSON"])
def test_announced_table_stands_beside_earlier_ones(tag: str) -> None:
    class Store:
        def __init__(self) -> None:
            self.tags = {"mlflow.loggedArtifacts": tag} if tag else {}

        def get_run(self, _: str) -> Any:
            return SimpleNamespace(data=SimpleNamespace(tags=self.tags))

        def set_tag(self, _: str, key: str, value: str) -> None:
            self.tags[key] = value

    store: Any = Store()
    for path in ("tables/epochs.json", "compile/functions.json", "tables/epochs.json"):
        announce_tables(store, "0", [path])
    tables = json.loads(store.tags["mlflow.loggedArtifacts"])
    assert [table["path"] for table in tables] == ["compile/functions.json", "tables/epochs.json"]
