"""Damaged tables of a training: one line, or figures that fit together; no memory for rows that take no bytes."""

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import dataset_info, learning_dynamics, model_config, random_split
from hypothesis import given
from hypothesis import strategies as st
from untrusted import MAX_BYTES, damaged, fuzz, on_linux, refusal, taken_bytes

from gradtrail.core.nn.models import Model
from gradtrail.stages.artifacts.weights import WeightsInfo, write_weights
from gradtrail.stages.gradients.inputs import read_dynamics, read_trajectory

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training of three epochs left."""
    folder = tmp_path_factory.mktemp("training")
    write_final(folder, epoch=3)
    (folder / "results").mkdir()
    return folder


@functools.cache
def initial_params() -> Any:
    return Model(model_config()).init(key=jax.random.key(0))


def write_final(folder: Path, epoch: int) -> None:
    info = WeightsInfo(model=model_config(), label_smoothing=0.1, dataset=dataset_info(), epoch=epoch)
    write_weights(folder / "models" / "final.safetensors", initial_params(), info)


def refused(folder: Path, **files: bytes) -> str | None:
    """Return the line with which the tables are refused; None where they are read, and fit."""
    written = {"steps.parquet": parquet(STEPS), "epochs.csv": EPOCHS, "dynamics.parquet": parquet(DYNAMICS)}
    for name, data in (written | {key.replace("_", "."): data for key, data in files.items()}).items():
        (folder / "results" / name).write_bytes(data)
    return refusal(functools.partial(read_all, folder))


def read_all(folder: Path) -> None:
    _, _, trajectory = read_trajectory(folder / "models", folder / "results", "final", dataset_info())
    assert np.isfinite(list(trajectory.weights.values())).all()
    assert trajectory.steps_per_epoch >= 1
    assert trajectory.batch_size >= 1
    for values in read_dynamics(folder / "results", SPLIT).values():
        assert values.shape == (len(SPLIT),)
        assert np.isfinite(values).all()


def test_what_a_training_left_is_read(folder: Path) -> None:
    assert refused(folder) is None


@fuzz(150)
@given(damaged(parquet(STEPS)))
def test_damaged_steps_are_read_or_refused(folder: Path, data: bytes) -> None:
    refused(folder, steps_parquet=data)


@fuzz(80)
@given(damaged(parquet(DYNAMICS)))
def test_damaged_dynamics_are_read_or_refused(folder: Path, data: bytes) -> None:
    refused(folder, dynamics_parquet=data)


@fuzz(80)
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
        assert "holds other examples" in (refused(folder, dynamics_parquet=parquet(columns)) or "")


def test_weights_after_more_epochs_than_there_were_are_refused(folder: Path) -> None:
    write_final(folder, epoch=4)
    try:
        assert "weights after epoch 4" in (refused(folder) or "")
    finally:
        write_final(folder, epoch=3)


@on_linux
def test_many_rows_in_few_bytes_take_no_memory(folder: Path) -> None:
    num_rows = 60_000_000
    zeros = {"num_examples": np.zeros(num_rows, np.int32), "learning_rate": np.zeros(num_rows, np.float32)}
    stream = io.BytesIO()
    pq.write_table(pa.table(zeros), stream)
    del zeros
    data = stream.getvalue()
    assert len(data) < 1_000_000
    pa.default_memory_pool().release_unused()
    assert taken_bytes(lambda: refused(folder, steps_parquet=data)) < MAX_BYTES
    assert "rows" in (refused(folder, steps_parquet=data) or "")
