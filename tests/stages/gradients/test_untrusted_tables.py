"""Damaged tables of a training are refused in one line, or read as values that fit together, in little memory."""

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import random_split
from hypothesis import given
from hypothesis import strategies as st
from stage_results import learning_dynamics
from untrusted import MAX_BYTES, damaged, fuzz, on_linux, refusal, taken_bytes

from gradtrail.stages.gradients.inputs import read_dynamics, read_schedule

SPLIT = random_split(12)
NUM_STEPS = 9
STEPS: dict[str, Any] = {
    "step": np.arange(1, NUM_STEPS + 1, dtype=np.int32),
    "num_examples": np.full(NUM_STEPS, 4, np.int32),
    "loss": np.linspace(2, 1, NUM_STEPS, dtype=np.float32),
    "learning_rate": np.linspace(0.1, 0.2, NUM_STEPS, dtype=np.float32),
}
DYNAMICS: dict[str, Any] = {"example_id": SPLIT.example_id, **learning_dynamics(12)}
EPOCHS = b"epoch,loss\n1,2.5\n2,1.5\n3,1.0\n"


def parquet(columns: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    pd.DataFrame(columns).to_parquet(stream, index=False)
    return stream.getvalue()


WRITTEN = {"steps.parquet": parquet(STEPS), "epochs.csv": EPOCHS, "dynamics.parquet": parquet(DYNAMICS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


def refused(folder: Path, **files: bytes) -> str | None:
    """Return the line with which the tables are refused; None where they are read, and fit together."""
    for name, data in (WRITTEN | {key.replace("_", "."): data for key, data in files.items()}).items():
        (folder / name).write_bytes(data)
    return refusal(functools.partial(read_all, folder))


def read_all(folder: Path) -> None:
    epochs, learning_rates, batch_size = read_schedule(folder)
    assert np.isfinite(learning_rates).all()
    assert len(learning_rates) >= epochs >= 1
    assert len(learning_rates) % epochs == 0
    assert batch_size >= 1
    for values in read_dynamics(folder, SPLIT).values():
        assert values.shape == (len(SPLIT),)
        assert np.isfinite(values).all()


def test_what_a_training_wrote_is_read(folder: Path) -> None:
    assert refused(folder) is None


@fuzz(100)
@given(damaged(parquet(STEPS)))
def test_damaged_steps_are_read_or_refused(folder: Path, data: bytes) -> None:
    refused(folder, steps_parquet=data)


@fuzz(50)
@given(damaged(parquet(DYNAMICS)))
def test_damaged_dynamics_are_read_or_refused(folder: Path, data: bytes) -> None:
    refused(folder, dynamics_parquet=data)


@fuzz(50)
@given(damaged(EPOCHS) | st.binary(max_size=30) | st.text(max_size=20).map(str.encode))
def test_a_damaged_table_of_epochs_is_read_or_refused(folder: Path, data: bytes) -> None:
    refused(folder, epochs_csv=data)


COLUMNS: dict[str, Callable[[int], Any]] = {
    "not finite": lambda size: np.full(size, np.nan, np.float32),
    "infinite": lambda size: np.full(size, np.inf, np.float32),
    "of another precision": lambda size: np.ones(size, np.float64),
    "of 64 bits": lambda size: np.ones(size, np.int64),
    "text": lambda size: ["one"] * size,
    "objects": lambda size: [{"one": 1}] * size,
    "lists": lambda size: [[1, 2]] * size,
    "truth": lambda size: np.ones(size, bool),
    "nothing": lambda size: [None] * size,
    "times": lambda size: pd.to_datetime(np.arange(size)),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("name", ["learning_rate", "num_examples", "example_id", "mean_probability"])
def test_a_column_of_another_kind_is_refused(folder: Path, name: str, kind: str) -> None:
    steps = STEPS | {name: COLUMNS[kind](NUM_STEPS)} if name in STEPS else STEPS
    dynamics = DYNAMICS | {name: COLUMNS[kind](len(SPLIT))} if name in DYNAMICS else DYNAMICS
    assert refused(folder, steps_parquet=parquet(steps), dynamics_parquet=parquet(dynamics))


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"learning_rate": STEPS["learning_rate"]},
        {name: values[:0] for name, values in STEPS.items()},
        {name: values[:8] for name, values in STEPS.items()},
        STEPS | {"num_examples": np.zeros(NUM_STEPS, np.int32)},
        STEPS | {"num_examples": np.full(NUM_STEPS, -4, np.int32)},
    ],
)
def test_steps_that_do_not_fit_are_refused(folder: Path, columns: dict[str, Any]) -> None:
    assert refused(folder, steps_parquet=parquet(columns))


@pytest.mark.parametrize("content", [b"epoch\n", b"\n", b"loss\n1\n", b"epoch\n0\n", b"epoch\n1\n1\n", b"epoch\nx\n"])
def test_epochs_that_do_not_count_are_refused(folder: Path, content: bytes) -> None:
    assert refused(folder, epochs_csv=content)


def test_dynamics_of_other_examples_are_refused(folder: Path) -> None:
    for columns in ({name: values[:-1] for name, values in DYNAMICS.items()}, DYNAMICS | {"example_id": np.int32(0)}):
        assert "has other examples" in (refused(folder, dynamics_parquet=parquet(columns)) or "")


@on_linux
def test_many_rows_in_few_bytes_take_no_memory(folder: Path) -> None:
    num_rows = 20_000_000  # 80 MB a column
    zeros = {"num_examples": np.zeros(num_rows, np.int32), "learning_rate": np.zeros(num_rows, np.float32)}
    stream = io.BytesIO()
    pq.write_table(pa.table(zeros), stream)
    del zeros
    data = stream.getvalue()
    assert len(data) < 1_000_000
    pa.default_memory_pool().release_unused()
    lines: list[str | None] = []
    assert taken_bytes(lambda: lines.append(refused(folder, steps_parquet=data))) < MAX_BYTES
    assert "rows" in (lines[0] or "")
