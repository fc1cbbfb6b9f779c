from pathlib import Path

import numpy as np
import pytest

from gradtrail.stages.artifacts.idx import RAW_FILES, describe_raw, encode_idx, measure_raw, read_raw
from gradtrail.support.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    arrays = (np.arange(5 * 16).reshape(5, 4, 4), np.arange(5), np.ones((3, 4, 4)), np.array([0, 1, 1]))
    for name, array in zip(RAW_FILES, arrays, strict=True):
        (tmp_path / name).write_bytes(encode_idx(array.astype(np.uint8)))
    return tmp_path


def test_description_follows_the_bytes(folder: Path) -> None:
    info = describe_raw(folder, "mnist")
    assert (info.image_shape, info.num_classes) == ((4, 4), 5)
    assert info.examples == {"train": 5, "test": 3}
    assert measure_raw(folder, info)["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    (folder / RAW_FILES[3]).write_bytes(encode_idx(np.array([1, 1, 1], np.uint8)))
    assert describe_raw(folder, "mnist").digest != info.digest


def test_images_without_labels_are_one_line(folder: Path) -> None:
    (folder / RAW_FILES[1]).write_bytes(encode_idx(np.arange(4).astype(np.uint8)))
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte: 5 images, but 4 labels"):
        describe_raw(folder, "mnist")


@pytest.mark.parametrize("name", RAW_FILES)
def test_files_that_were_changed_since_are_refused(name: str, folder: Path) -> None:
    info = describe_raw(folder, "mnist")
    assert len(read_raw(folder, info).images) == 5
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"{name}: not the bytes that"):
        read_raw(folder, info)
