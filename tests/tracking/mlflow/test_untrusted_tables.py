"""Tables that a run is rebuilt from: damaged ones are refused in one line, and a mere claim takes no memory."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from untrusted import MAX_BYTES, damaged, fuzz, on_linux, refusal, taken_bytes

from gradtrail.tracking.mlflow.artifacts import announce_tables, read_curves, read_tables

EPOCHS = b"epoch,loss\n1,2.5\n2,1.5\n"


def parquet(columns: dict[str, object]) -> bytes:
    stream = io.BytesIO()
    pd.DataFrame(columns).to_parquet(stream, index=False)
    return stream.getvalue()


STEPS = parquet({"step": np.arange(1, 9, dtype=np.int32), "loss": np.linspace(2, 1, 8, dtype=np.float32)})


def refused(folder: Path, steps: bytes = STEPS, epochs: bytes = EPOCHS) -> str | None:
    (folder / "steps.parquet").write_bytes(steps)
    (folder / "epochs.csv").write_bytes(epochs)
    return refusal(lambda: read_tables(folder))


def test_good_ones_are_read(tmp_path: Path) -> None:
    assert refused(tmp_path) is None
    epochs, steps = read_tables(tmp_path)
    assert (epochs["epoch"].tolist(), steps["step"].tolist()) == ([1, 2], list(range(1, 9)))


@pytest.mark.parametrize("steps", [b"", b"PAR1", STEPS[: len(STEPS) // 2], b"PAR1" + bytes(100) + b"PAR1"])
def test_damage_is_one_line_that_names_the_file(steps: bytes, tmp_path: Path) -> None:
    assert (refused(tmp_path, steps) or "").startswith(f"{tmp_path}/steps.parquet: not a table of this project: ")


@pytest.mark.parametrize("epochs", [b"", b"\xff\xfe\x00", b'a,b\n"1,2\n', b"a\n1,2\n3,4,5\n"])
def test_damaged_text_is_one_line_that_names_the_file(epochs: bytes, tmp_path: Path) -> None:
    assert (refused(tmp_path, epochs=epochs) or "").startswith(f"{tmp_path}/epochs.csv: not a table of this project: ")


@pytest.mark.parametrize(
    ("file", "data", "reason"),
    [
        ("epochs.csv", b"era,loss\n1,2.5\n", "it has no column 'epoch'"),
        ("epochs.csv", b"epoch,loss\n1,2.5\n,1.5\n", "column 'epoch' is of float64"),
        ("epochs.csv", b"epoch,loss\n1,much\n", "column 'loss' is of "),
        ("steps.parquet", parquet({"loss": [1.0]}), "it has no column 'step'"),
        ("steps.parquet", parquet({"step": [1], "loss": ["much"]}), "column 'loss' is of "),
        ("noise_scale.csv", b"epoch,noise_scale\nfirst,1\n", "column 'epoch' is of "),
    ],
)
def test_other_columns_are_one_line_that_names_the_file(file: str, data: bytes, reason: str, tmp_path: Path) -> None:
    for name, good in {"epochs.csv": EPOCHS, "steps.parquet": STEPS, file: data}.items():
        (tmp_path / name).write_bytes(good)
    line = refusal(lambda: read_curves(tmp_path, "train", {"planned_steps": 6})) or ""
    assert line.startswith(f"{tmp_path}/{file}: not a table of this project: {reason}")


@pytest.mark.parametrize("metrics", [{}, {"planned_steps": "six"}, {"planned_steps": 6.5}])
def test_curves_need_the_planned_steps(metrics: dict[str, Any], tmp_path: Path) -> None:
    assert refused(tmp_path) is None
    line = refusal(lambda: read_curves(tmp_path, "train", metrics)) or ""
    assert line.startswith("results/metrics/train.json: planned_steps should be an integer, got ")


def test_the_curve_of_one_member_does_not_take_the_place_of_epsilon_of_all(tmp_path: Path) -> None:
    assert refused(tmp_path, epochs=b"epoch,epsilon\n1,0.5\n") is None
    metrics = {"planned_steps": 6, "epsilon": 0.5}
    alone = read_curves(tmp_path, "train", metrics)
    assert alone["train/epsilon"] == {1: 0.5}
    several = read_curves(tmp_path, "train", metrics | {"epsilon": 0.9, "epsilon_each": 0.5})
    assert several == {"train/epsilon_each" if name == "train/epsilon" else name: alone[name] for name in alone}


def test_a_missing_one_is_named(tmp_path: Path) -> None:
    assert "epochs.csv" in (refusal(lambda: read_tables(tmp_path)) or "")


@on_linux
def test_billions_of_equal_rows_take_no_memory(tmp_path: Path) -> None:
    rows, stream = 2**24 + 1, io.BytesIO()
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array([1.0]))
    pq.write_table(pa.table({"step": column}), stream)
    assert taken_bytes(lambda: refused(tmp_path, stream.getvalue())) < MAX_BYTES
    assert "more than 16,777,216 rows" in (refused(tmp_path, stream.getvalue()) or "")


@fuzz(60)
@given(damaged(STEPS))
def test_damaged_bytes_are_read_or_refused(tmp_path: Path, steps: bytes) -> None:
    line = refused(tmp_path, steps)
    assert line is None or line.startswith(f"{tmp_path}/steps.parquet: ")


@pytest.mark.parametrize("tag", ["", "no JSON", "{}", "[1, null]", "[" * 100_000])
def test_tables_are_announced_beside_others_whatever_the_tag_has(tag: str) -> None:
    class Store:
        def __init__(self) -> None:
            self.tags = {"mlflow.loggedArtifacts": tag} if tag else {}

        def get_run(self, _: str) -> Any:
            return SimpleNamespace(data=SimpleNamespace(tags=self.tags))

        def set_tag(self, _: str, key: str, value: str) -> None:
            self.tags[key] = value

    store: Any = Store()
    announce_tables(store, "0", ["tables/epochs.json"])
    announce_tables(store, "0", ["compile/functions.json"])
    announce_tables(store, "0", ["tables/epochs.json"])
    tables = json.loads(store.tags["mlflow.loggedArtifacts"])
    assert [table["path"] for table in tables] == ["compile/functions.json", "tables/epochs.json"]
