"""Splits come back as they were written, and a damaged or foreign file is refused in one line."""

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from factories import dataset_info, random_split
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradtrail.core.common.split import Split
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
    """Return a description that a file's bytes agree with, whatever they are."""
    return dataset_info(files={path.name: dataset.sha256(path)} if path.is_file() else {})


def refusal(path: Path, info: DatasetInfo | None = None) -> str:
    """Return the one line with which a split's file is refused, by default though its digest is right."""
    with pytest.raises(UserError) as caught:
        dataset.read_split(path, info or described(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_processed_folder_comes_back(tmp_path: Path) -> None:
    splits = {name: random_split(size) for name, size in zip(dataset.SPLITS, (5, 4, 3), strict=True)}
    dataset.write_processed(tmp_path / "processed", splits, INFO)
    info = dataset.read_info(tmp_path / "processed")
    files = {path.name: dataset.sha256(path) for path in (tmp_path / "processed").glob("*.npz")}
    assert len(files) == 3
    assert info == dataclasses.replace(INFO, examples={"train": 5, "validation": 4, "test": 3}, files=files)
    for name, split in read_splits(tmp_path / "processed", info).items():
        assert_equal(split, splits[name])


def test_equal_splits_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("left", "right"):
        dataset.write_split(tmp_path / f"{name}.npz", SPLIT)
    assert (tmp_path / "left.npz").read_bytes() == (tmp_path / "right.npz").read_bytes()


@pytest.mark.parametrize("cut", [0, 1, 100, -1, -30, -400])
def test_a_truncated_file_is_refused(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "train.npz"
    dataset.write_split(path, SPLIT)
    path.write_bytes(path.read_bytes()[:cut])
    refusal(path)


def test_a_flipped_pixel_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.npz"
    dataset.write_split(path, SPLIT)
    data = bytearray(path.read_bytes())
    data[data.index(SPLIT.images.tobytes()) + 5] ^= 1
    path.write_bytes(data)
    assert "damaged" in refusal(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path, place: int, bit: int) -> None:
    path = tmp_path / "train.npz"
    dataset.write_split(path, SPLIT)
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with contextlib.suppress(UserError):
        assert_equal(dataset.read_split(path, described(path)), SPLIT)


def test_a_whole_file_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.npz"
    dataset.write_split(path, SPLIT)
    info = described(path)
    dataset.write_split(path, random_split(7))
    assert "not the bytes that" in refusal(path, info)


@pytest.mark.parametrize("content", [b"", b"text", b"\x93NUMPY\x01\x00", b"\x80\x04N."])
def test_a_file_that_is_no_npz_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.npz"
    path.write_bytes(content)
    refusal(path)


def test_a_single_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", SPLIT.images)
    refusal((tmp_path / "train.npy").rename(tmp_path / "train.npz"))


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        ("images", SPLIT.images.astype(np.float32), "images is float32"),
        ("images", SPLIT.images[:, :2], "images is uint8"),
        ("images", SPLIT.images[:5], "images is uint8"),
        ("labels", SPLIT.labels.astype(np.int64), "labels is int64"),
        ("labels", SPLIT.labels[:, None], "labels is int32"),
        ("labels", np.full(6, 3, np.int32), "labels must be 0 to 2"),
        ("labels", np.full(6, -1, np.int32), "labels must be 0 to 2"),
        ("true_labels", SPLIT.true_labels[:5], "true_labels is int32"),
        ("true_labels", np.full(6, 3, np.int32), "true_labels must be 0 to 2"),
        ("example_id", SPLIT.example_id.astype(np.uint8), "example_id is uint8"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name: str, array: np.ndarray, reason: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", **{**vars(SPLIT), name: array})
    assert reason in refusal(tmp_path / "train.npz")


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", **{name: array[:0] for name, array in vars(SPLIT).items()})
    assert "at least one" in refusal(tmp_path / "train.npz")


def test_a_missing_array_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", images=SPLIT.images, labels=SPLIT.labels)
    assert "damaged" in refusal(tmp_path / "train.npz")


def test_pickled_objects_are_refused_unread(tmp_path: Path) -> None:
    objects = np.array([Bomb()], dtype=object)
    np.savez(tmp_path / "train.npz", allow_pickle=True, **{**vars(SPLIT), "labels": objects})
    assert "pickle" in refusal(tmp_path / "train.npz")


class Bomb:
    def __reduce__(self) -> tuple:
        return pytest.fail, ("a pickle was read",)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"name": "digits"}'],
)
def test_a_description_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(UserError) as caught:
        dataset.read_info(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "dataset.json"))
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named_with_what_makes_it(tmp_path: Path) -> None:
    assert "dvc repro" in refusal(tmp_path / "train.npz")
    with pytest.raises(UserError, match=r"dataset\.json: no such file; `dvc repro`"):
        dataset.read_info(tmp_path)


def test_figures_of_the_splits() -> None:
    noisy = dataclasses.replace(SPLIT, labels=(SPLIT.labels + np.array([1, 0, 0, 0, 0, 1], np.int32)) % 3)
    figures = dataset.measure_splits({"train": noisy, "test": random_split(4)})
    assert (figures["train_examples"], figures["test_examples"], figures["noisy_labels"]) == (6, 4, 2)
    assert figures["pixel_mean"] == pytest.approx(np.mean(SPLIT.images / 255.0))
    assert figures["pixel_std"] == pytest.approx(np.std(SPLIT.images / 255.0))
