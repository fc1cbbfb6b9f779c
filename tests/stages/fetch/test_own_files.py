"""The user's own IDX files: any images and classes, and errors that name the file."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from acquiring import LAST, SMALL, Acquisition, as_files, random_arrays, write_folder
from mirrors import MirrorServer

from gradtrail.stages.artifacts.idx import RAW_FILES, encode_idx
from gradtrail.stages.fetch import sources


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize(("shape", "num_classes"), [((12, 10), 4), ((1, 1), 2), ((3, 100), 10)])
def test_own_folder_may_hold_any_images_and_classes(
    acquisition: Acquisition,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int],
    num_classes: int,
    *,
    gzipped: bool,
) -> None:
    files = as_files(random_arrays(shape, num_classes))
    monkeypatch.setenv("IDX_DIR", str(write_folder(tmp_path / "own", files, gzipped=gzipped)))
    info = acquisition.acquire("idx")
    assert acquisition.written() == files
    assert (info.name, info.image_shape, info.num_classes) == ("idx", shape, num_classes)
    assert info.examples == {"train": 20, "test": 10}
    assert info.files == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert acquisition.reports() == [f"IDX files from {tmp_path / 'own'}"]


OWN_FAULTS: dict[str, tuple[str, bytes | None, str]] = {
    "missing": (LAST, None, f"there is neither {LAST} nor {LAST}.gz"),
    "no IDX": (LAST, b"label,pixel\n" * 10, f"{LAST}: magic number is 0x6c616265"),
    "truncated": (RAW_FILES[0], SMALL[RAW_FILES[0]][:-1], "needs exactly"),
    "a label too few": (RAW_FILES[1], encode_idx(np.zeros(19, np.uint8)), f"{RAW_FILES[0]}: 20 images, but 19 labels"),
    "test images of another size": (
        RAW_FILES[2],
        encode_idx(np.zeros((10, 28, 27), np.uint8)),
        f"{RAW_FILES[2]}: images of (28, 27) pixels, but (28, 28) in {RAW_FILES[0]}",
    ),
}


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_faulty_own_file_is_named_in_one_line(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    name, data, reason = OWN_FAULTS[fault]
    folder = write_folder(tmp_path / "own", {**SMALL, name: data or b""})
    if data is None:
        (folder / name).unlink()
    monkeypatch.setenv("IDX_DIR", str(folder))
    line = acquisition.refusal("idx", mirrors=None, openml=True)
    assert line.startswith(f"IDX_DIR: {folder}")
    assert reason in line
    assert str(acquisition.to) not in line
    assert acquisition.reports() == []


def test_single_class_is_refused(acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDX_DIR", str(write_folder(tmp_path / "own", as_files(random_arrays(num_classes=1)))))
    assert f"{RAW_FILES[1]}: every label is 0; at least 2 classes are needed" in acquisition.refusal("idx")


def test_gzip_bomb_in_own_folder_ends_at_a_limit(
    acquisition: Acquisition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_MAX_OWN_BYTES", 1 << 20)
    monkeypatch.setenv("IDX_DIR", str(write_folder(tmp_path / "own", {**SMALL, LAST: bytes(1 << 24)}, gzipped=True)))
    assert f"{LAST}.gz: more than 1048576 bytes" in acquisition.refusal("idx")


def test_variable_of_own_folder_must_be_set(acquisition: Acquisition, internet: MirrorServer) -> None:
    expected = "no source of IDX files to ask, as IDX_DIR is not set: set IDX_DIR to a folder with the four IDX files"
    assert acquisition.refusal("idx", mirrors=(internet.base(),), openml=True) == expected
    assert internet.requests == []
