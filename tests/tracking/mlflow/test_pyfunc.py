"""A served model gives the answers of the network for any number of images, and refuses other input in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import SHAPE, write_small_export, write_wrong_export
from mlflow.exceptions import MlflowException

from gradtrail.stages.artifacts.exported import read_export
from gradtrail.tracking.mlflow.pyfunc import ServedModel, _load_pyfunc

PIXELS = np.random.default_rng(0).integers(0, 256, (70, *SHAPE), np.uint8)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = write_small_export(tmp_path_factory.mktemp("exported") / "export", model="linear", batch_sizes=(1, 32))
    return _load_pyfunc(str(folder))


@pytest.mark.parametrize("count", [0, 1, 3, 31, 32, 33, 70])
def test_any_number_of_images_gets_the_same_answers(served: ServedModel, count: int) -> None:
    answer, whole = served.predict(PIXELS[:count]), served.predict(PIXELS)
    assert answer["probabilities"].dtype == np.float32
    np.testing.assert_allclose(answer["probabilities"], whole["probabilities"][:count], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(answer["label"], answer["probabilities"].argmax(axis=1))
    assert answer["label"].dtype == np.int64


def test_the_answers_are_those_of_the_export(tmp_path: Path) -> None:
    exported = read_export(write_small_export(tmp_path / "export", model="linear", members=2, batch_sizes=(8,)))
    answer = ServedModel(exported).predict(PIXELS[:8])
    np.testing.assert_array_equal(answer["probabilities"], exported.predict(PIXELS[:8]))


def test_a_damaged_export_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_small_export(tmp_path / "export", model="linear")
    (folder / "weights.safetensors").write_bytes(b"words")
    with pytest.raises(MlflowException, match="is not the file that was exported"):
        _load_pyfunc(str(folder))


def test_answers_that_are_no_probabilities_are_refused_in_one_line(tmp_path: Path) -> None:
    wrong = _load_pyfunc(str(write_wrong_export(tmp_path / "export", answers="NaN")))
    with pytest.raises(MlflowException, match="digits: its answers to 3 of 3 images are not probabilities"):
        wrong.predict(PIXELS[:3])


@pytest.mark.parametrize(
    "same",
    [
        PIXELS[:3].astype(np.int64),
        PIXELS[:3].tolist(),
        PIXELS[:3].astype(object),
        PIXELS[:3] / 255,
        (PIXELS[:3] / 255).astype(np.float32),
        (PIXELS[:3] / 255).tolist(),
    ],
)
def test_whole_numbers_and_floats_are_the_same_image(served: ServedModel, same: Any) -> None:
    expected = served.predict(PIXELS[:3])["probabilities"]
    np.testing.assert_array_equal(served.predict(same)["probabilities"], expected)


@pytest.mark.parametrize("one", [PIXELS[0], PIXELS[0].tolist(), PIXELS[0] / 255])
def test_a_single_image_is_a_batch_of_one(served: ServedModel, one: Any) -> None:
    expected = served.predict(PIXELS[:1])["probabilities"]
    np.testing.assert_array_equal(served.predict(one)["probabilities"], expected)


@pytest.mark.parametrize(
    ("data", "actual"),
    [
        (PIXELS[0, 0], f"shape {SHAPE[1:]}"),
        (PIXELS[0].T[:-1], f"shape {(SHAPE[1] - 1, SHAPE[0])}"),
        (PIXELS[:2, :-1], f"shape (2, {SHAPE[0] - 1}, {SHAPE[1]})"),
        (PIXELS[:2, ..., None], f"shape (2, {SHAPE[0]}, {SHAPE[1]}, 1)"),
        ([[1, 2], [3]], "rows or images of different lengths"),
        (PIXELS[:1].astype(str), "values of type <U3"),
        (PIXELS[:1] > 9, "values of type bool"),
        (np.full((1, *SHAPE), 256), "int64 from 256 to 256"),
        (np.full((1, *SHAPE), -1), "int64 from -1 to -1"),
        (np.full((1, *SHAPE), 255.0), "float64 from 255 to 255"),
        (np.full((1, *SHAPE), np.nan), "float64 from nan to nan"),
        (np.eye(*SHAPE, dtype=int).tolist(), "int64 that are all 0 or 1, which may be either"),
        (None, "shape ()"),
    ],
)
def test_other_input_is_refused_in_one_line(served: ServedModel, data: Any, actual: str) -> None:
    with pytest.raises(MlflowException) as caught:
        served.predict(data)
    assert str(caught.value).startswith(f"images: an array (images, {SHAPE[0]}, {SHAPE[1]}) of whole numbers")
    assert str(caught.value).endswith(f"; got {actual}")
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"
