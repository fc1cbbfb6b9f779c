"""scikit-learn's digits in the form of MNIST, to the byte."""

import dataclasses
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets  # type: ignore[import-untyped]
from factories import ROOT

from gradtrail.stages.common.environment import RuntimeConfig
from gradtrail.stages.common.params import load_section
from gradtrail.stages.data.data_files import RawArrays, encode_idx, read_raw
from gradtrail.stages.datasets import DATASETS, load_digits
from gradtrail.stages.fetch import FetchConfig, acquire, known_files


@pytest.fixture(scope="module")
def arrays() -> RawArrays:
    return load_digits()


def test_digits_are_the_bytes_of_the_catalog(arrays: RawArrays) -> None:
    """Change those only together with the digits themselves: every model trained on them changes too."""
    for file, array in zip(known_files(DATASETS["digits"]), arrays, strict=True):
        assert hashlib.sha256(encode_idx(array)).hexdigest() == file.sha256


def test_digits_are_enlarged_bilinearly_and_framed_as_mnist_is(arrays: RawArrays) -> None:
    """Compare with a plain loop in floating point: within the rounding of a half."""
    first = sklearn.datasets.load_digits().images[0] * 255 / 16
    assert arrays[0][0].sum(dtype=int) == arrays[0][0, 4:24, 4:24].sum(dtype=int)
    for row, column in np.ndindex(20, 20):
        y, x = np.clip((np.array([row, column]) + 0.5) * 0.4 - 0.5, 0, 7)
        top, left = min(int(y), 6), min(int(x), 6)
        dy, dx = y - top, x - left
        upper = first[top, left] * (1 - dx) + first[top, left + 1] * dx
        lower = first[top + 1, left] * (1 - dx) + first[top + 1, left + 1] * dx
        expected = upper * (1 - dy) + lower * dy
        assert abs(arrays[0][0, row + 4, column + 4] - expected) <= 0.5 + 1e-9


@pytest.mark.parametrize("name", [name for name, entry in DATASETS.items() if entry.num_train])
def test_real_files_are_those_that_the_catalog_describes(name: str, tmp_path: Path) -> None:
    """Of what needs a network, where the environment names a folder with it."""
    entry = DATASETS[name]
    if entry.folder_variable and not os.environ.get(entry.folder_variable):
        pytest.skip(f"{entry.folder_variable} is not set: it names a folder with the four files of {entry.title}")
    runtime = load_section("runtime", RuntimeConfig, ROOT / "params.yaml")
    fetch = load_section("fetch", FetchConfig, ROOT / "params.yaml")
    info = acquire(dataclasses.replace(fetch, dataset=name), tmp_path, runtime)
    _, labels, _, _ = read_raw(tmp_path)
    assert (info.image_shape, info.num_classes) == (entry.image_shape, 10)
    assert len(labels) == entry.num_train
    if name == "mnist":
        assert np.bincount(labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
