"""A Parquet table is read; a missing or truncated one is an error of one line."""

import io
from pathlib import Path

import pandas as pd
import pytest
from untrusted import refusal

from gradtrail.stages.artifacts.parquet import read_parquet

TABLE = pd.DataFrame({"number": [1, 2, 3], "word": ["a", "b", "c"], "share": [0.5, 0.25, 1.0]})


def encoded(table: pd.DataFrame = TABLE) -> bytes:
    stream = io.BytesIO()
    table.to_parquet(stream, index=False)
    return stream.getvalue()


def test_columns_are_read_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(encoded())
    pd.testing.assert_frame_equal(read_parquet(tmp_path / "a.parquet", ["share", "word"]), TABLE[["share", "word"]])


def test_index_that_pandas_wrote_is_a_column_like_others(tmp_path: Path) -> None:
    TABLE.set_index("word").to_parquet(tmp_path / "a.parquet")
    assert read_parquet(tmp_path / "a.parquet", ["word"])["word"].tolist() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [(["number", "none"], "not a table of this project: No match"), (["number"], "no such file")],
)
def test_missing_file_or_column_is_one_line(columns: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    if "none" in columns:
        path.write_bytes(encoded())
    line = refusal(lambda: read_parquet(path, columns, made_by="it"))
    assert line is not None
    assert line.startswith(f"{path}: {message}")
    assert "`it` makes it" in line


@pytest.mark.parametrize("cut", [0, 4, -1])
def test_truncated_table_is_one_line(tmp_path: Path, cut: int) -> None:
    (tmp_path / "a.parquet").write_bytes(encoded()[:cut])
    line = refusal(lambda: read_parquet(tmp_path / "a.parquet", [*TABLE]))
    assert (line or "").startswith(f"{tmp_path}/a.parquet: not a table of this project: ")
