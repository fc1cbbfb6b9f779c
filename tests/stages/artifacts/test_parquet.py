"""A Parquet table is read; a missing or truncated one is an error of one line."""

import io
from pathlib import Path

import pandas as pd
import pytest
from untrusted import refusal

from gradtrail.stages.artifacts.parquet import read_parquet

TABLE = pd.DataFrame({"number": [1, 2, 3], "word": ["a", "b", "c"], "share": [0.5, 0.25, 1.0]})


def encoded() -> bytes:
    stream = io.BytesIO()
    TABLE.to_parquet(stream, index=False)
    return stream.getvalue()


def test_columns_are_read_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(encoded())
    pd.testing.assert_frame_equal(read_parquet(tmp_path / "a.parquet", ["share", "word"]), TABLE[["share", "word"]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encoded(), "not a table of this project: No match"),
        (encoded()[:-1], "not a table of this project: "),
        (b"", "not a table of this project: "),
        (None, "no such file"),
    ],
)
def test_missing_or_truncated_table_or_a_missing_column_is_one_line(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    if content is not None:
        path.write_bytes(content)
    line = refusal(lambda: read_parquet(path, ["number", "none"], made_by="it"))
    assert line is not None
    assert line.startswith(f"{path}: {message}")
    assert "`it` makes it" in line
