"""Splits read back as they were written; a damaged or foreign file is refused in one line."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from factories import dataset_info, random_split

from gradtrail.core.data import Split
from gradtrail.stages.artifacts.splits import read_splits
from gradtrail.stages.common import dataset
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.support.errors import UserError

SPLIT = random_split(6)
INFO = dataset_info()


def assert_equal(left: Split, right: Split) -> None:
    for field in dataclasses.fields(Split):
        one, other = getattr(left, field.name), getattr(right, field.name)
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def described(path: Path) -> DatasetInfo:
    """Return a description that a file's bytes agree with."""
    return dataset_info(files={path.name: dataset.sha256(path)})


def refusal(path: Path, info: DatasetInfo) -> str:
    """Return the one line with which a split's file is refused."""
    with pytest.raises(UserError) as caught:
        dataset.read_split(path, info)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_processed_folder_comes_back(tmp_path: Path) -> None:
    splits = {name: random_split(size) for name, size in zip(dataset.SPLITS, (5, 4, 3), strict=True)}
    dataset.write_processed(tmp_path / "processed", splits, INFO)
    info = dataset.read_info(tmp_path / "processed")
    files = {path.name: dataset.sha256(path) for path in (tmp_path / "processed").glob("*.npz")}
    assert len(files) == 3
    assert info == dataclasses.replace(INFO, examples={"train": 5, "validation": 4, "test": 3}, files=files)
    for name, split in read_splits(tmp_path / "processed", info).items():
        assert_equal(split, splits[name])


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    objects = np.array([Bomb()], dtype=object)
    np.savez(tmp_path / "train.npz", allow_pickle=True, **{**vars(SPLIT), "labels": objects})
    with pytest.raises(ValueError, match="pickle"):
        dataset.read_split(tmp_path / "train.npz", described(tmp_path / "train.npz"))


class Bomb:
    def __reduce__(self) -> tuple:
        return pytest.fail, ("a pickle was read",)


def test_truncated_or_missing_file_is_one_line(tmp_path: Path) -> None:
    path, description = tmp_path / "train.npz", tmp_path / "dataset.json"
    assert "dvc repro" in refusal(path, INFO)
    dataset.write_split(path, SPLIT)
    info = described(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert "not the bytes that" in refusal(path, info)
    with pytest.raises(UserError, match=r"dataset\.json: no such file; `dvc repro`"):
        dataset.read_info(tmp_path)
    description.write_text('{"name": "digits"}')
    with pytest.raises(UserError, match=rf"^{description}[^\n]*$"):
        dataset.read_info(tmp_path)


def test_figures_of_the_splits() -> None:
    noisy = dataclasses.replace(SPLIT, labels=(SPLIT.labels + np.array([1, 0, 0, 0, 0, 1], np.int32)) % 3)
    figures = dataset.measure_splits({"train": noisy, "test": random_split(4)})
    assert (figures["train_examples"], figures["test_examples"], figures["noisy_labels"]) == (6, 4, 2)
    assert figures["pixel_mean"] == pytest.approx(np.mean(SPLIT.images / 255.0))
    assert figures["pixel_std"] == pytest.approx(np.std(SPLIT.images / 255.0))
