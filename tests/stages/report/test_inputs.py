"""A missing or damaged input of the report is an error of one line."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from report_folder import SHOWN, TABLES, render

from gradtrail.support.errors import UserError


@pytest.mark.parametrize(
    "file",
    [
        *(
            "params.yaml",
            "pipeline/versions.yaml",
            "data/raw",
            "data/processed/dataset.json",
            "data/processed/train.npz",
        ),
        *("models/final.safetensors", "results/metrics/train.json", "results/gradients/summary.md"),
        *(f"results/{name}.csv" for name in TABLES),
        *(f"results/{name}.png" for name in SHOWN),
        *("results/evaluate/predictions.parquet", "results/gradients/scores.parquet", "data/processed/test.npz"),
    ],
)
def test_missing_file_is_one_line(file: str, folder: Path) -> None:
    path = folder / file
    (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    with pytest.raises(UserError, match=f"{re.escape(file)}: no such file") as error:
        render(folder)
    assert len(str(error.value).splitlines()) == 1


def write(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text.encode("latin-1"))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("results/metrics/train.json", write("{"), "not readable as JSON"),
        ("results/metrics/train.json", write('{"dataset_digest": "other"}'), "of another data set"),
        ("results/evaluate/predictions.parquet", write("PAR1"), "not a table of this project"),
        ("params.yaml", write("train: 1\n"), "train.model is missing"),
    ],
)
def test_damaged_file_is_one_line(file: str, change: Callable[[Path], object], message: str, folder: Path) -> None:
    change(folder / file)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        render(folder)
    assert Path(file).name in str(error.value)
    assert len(str(error.value).splitlines()) == 1
