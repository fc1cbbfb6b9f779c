"""Predictions of any number of images: equal to the model's own, whatever holds the images, killed or not."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exports import write_small_export
from factories import ROOT
from PIL import Image
from untrusted import on_linux, taken_bytes

from gradtrail.serving.predict import batch
from gradtrail.serving.predict.batch import predict_into
from gradtrail.stages.artifacts.exported import ExportedModel, read_export
from gradtrail.support.errors import UserError


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_export(tmp_path_factory.mktemp("model") / "export")


@pytest.fixture
def model(export: Path) -> ExportedModel:
    return read_export(export)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of two batches of eight images."""
    monkeypatch.setattr(batch, "BATCH_SIZE", 8)
    monkeypatch.setattr(batch, "PART_SIZE", 16)


def pixels(count: int) -> np.ndarray:
    """Return images with something bright inside a black edge, so that files of them are taken as they are."""
    images = np.zeros((count, 28, 28), np.uint8)
    images[:, 4:24, 4:24] = np.random.default_rng(0).integers(100, 256, (count, 20, 20))
    return images


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def as_folder(images: np.ndarray, path: Path) -> Path:
    for number, image in enumerate(images):
        file = path / f"{number // 10}" / f"{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(image))
    (path / "notes.txt").write_text("no image")
    return path


def as_npz(images: np.ndarray, path: Path) -> Path:
    np.savez_compressed(path.with_suffix(".npz"), images=images, labels=np.zeros(len(images)))
    return path.with_suffix(".npz")


def as_parquet(column: Callable[[np.ndarray], pa.Array]) -> Callable[[np.ndarray, Path], Path]:
    def write(images: np.ndarray, path: Path) -> Path:
        table = pa.table({"label": np.zeros(len(images)), "image": column(images)})
        pq.write_table(table, path.with_suffix(".parquet"), row_group_size=11)
        return path.with_suffix(".parquet")

    return write


FORMS: dict[str, Callable[[np.ndarray, Path], Path]] = {
    "folder": as_folder,
    "npz": as_npz,
    "parquet of png": as_parquet(lambda images: pa.array(map(png, images))),
    "parquet of structs": as_parquet(lambda images: pa.array([{"bytes": png(image), "path": ""} for image in images])),
    "parquet of lists": as_parquet(lambda images: pa.array([*images.reshape(-1, 784)])),
    "parquet of fixed lists": as_parquet(lambda images: pa.FixedSizeListArray.from_arrays(images.ravel(), 784)),
    "parquet of binary": as_parquet(lambda images: pa.array([each.tobytes() for each in images], pa.binary(784))),
}


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_the_models_whatever_holds_the_images(form: str, model: ExportedModel, tmp_path: Path) -> None:
    images = pixels(43)
    source, out = FORMS[form](images, tmp_path / "images"), tmp_path / "new" / "out.parquet"
    assert not predict_into(out, [source], model, "3")
    table = pq.read_table(out)
    expected = model.predict(images)
    found = np.stack(table["probabilities"].to_numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(table["label"], expected.argmax(axis=1))
    np.testing.assert_array_equal(table["confidence"], found.max(axis=1))
    assert table["class"].to_pylist() == [model.manifest.classes[label] for label in expected.argmax(axis=1)]
    assert table["error"].null_count == len(images)
    if form == "folder":
        assert table["path"].to_pylist() == sorted(map(str, source.rglob("*.png")))
        assert table["index"].null_count == len(images)
    else:
        assert set(table["path"].to_pylist()) == {str(source)}
        np.testing.assert_array_equal(table["index"], range(len(images)))
    about = table.schema.metadata
    assert about[b"gradtrail.model_digest"].decode() == model.manifest.digest
    assert about[b"gradtrail.model"] == b"digits version 3"
    assert json.loads(about[b"gradtrail.classes"]) == [*model.manifest.classes]
    assert [path.name for path in out.parent.iterdir()] == ["out.parquet"]


def test_predict_runs_where_cores_cannot_be_assigned(
    model: ExportedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert not predict_into(tmp_path / "out.parquet", [as_folder(pixels(3), tmp_path / "images")], model)


def test_several_sources_follow_each_other(model: ExportedModel, tmp_path: Path) -> None:
    images = pixels(60)
    one = tmp_path / "z.PNG"
    one.write_bytes(png(images[0]))
    sources = [one, as_folder(images[1:20], tmp_path / "a"), as_npz(images[20:], tmp_path / "n")]
    assert not predict_into(tmp_path / "out.parquet", sources, model)
    found = np.stack(pq.read_table(tmp_path / "out.parquet")["probabilities"].to_numpy())
    np.testing.assert_allclose(found, model.predict(images), rtol=1e-5)


def test_bad_images_are_rows_with_their_reason_and_change_no_other(model: ExportedModel, tmp_path: Path) -> None:
    images = pixels(40)
    cells: list[Any] = [*map(png, images)]
    cells[3], cells[9], cells[20], cells[39] = b"no image", None, png(np.zeros_like(images[0])), cells[39][:60]
    pq.write_table(pa.table({"image": cells}), tmp_path / "a.parquet")
    assert predict_into(tmp_path / "out.parquet", [tmp_path / "a.parquet"], model) == 4
    table = pq.read_table(tmp_path / "out.parquet")
    errors = {place: error for place, error in enumerate(table["error"].to_pylist()) if error}
    assert errors[3].startswith("not a readable image: none of PNG")
    assert (errors[9], errors[20][:19]) == ("no image", "the image is blank:")
    assert errors[39].startswith("not a readable image: ")
    assert {*errors} == {3, 9, 20, 39}
    for name in ("label", "class", "confidence"):
        assert [*np.flatnonzero(table[name].is_null())] == sorted(errors)
    assert [*np.flatnonzero(np.isnan(np.stack(table["probabilities"].to_numpy())).all(axis=1))] == sorted(errors)
    rest = np.delete(np.arange(40), sorted(errors))
    found = np.stack(table["probabilities"].take(rest).to_numpy())
    np.testing.assert_allclose(found, model.predict(images[rest]), rtol=1e-5)


def test_lists_that_hold_no_image_are_rows_with_their_reason(model: ExportedModel, tmp_path: Path) -> None:
    images = pixels(5).reshape(5, 784)
    cells: list[Any] = [each.tolist() for each in images]
    cells[1], cells[2], cells[3][5] = [1, 2, 3], None, None
    pq.write_table(pa.table({"image": pa.array(cells, pa.list_(pa.uint8()))}), tmp_path / "a.parquet")
    assert predict_into(tmp_path / "out.parquet", [tmp_path / "a.parquet"], model) == 3
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["error"].to_pylist() == [None, "3 pixels; must have 784", "no image", "pixels are missing", None]
    found = np.stack(table["probabilities"].take([0, 4]).to_numpy())
    np.testing.assert_allclose(found, model.predict(images[[0, 4]].reshape(-1, 28, 28)), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_killed_anywhere_and_resumed_gives_the_same_bytes_and_repeats_no_finished_part(
    form: str, model: ExportedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, calls = FORMS[form](pixels(70), tmp_path / "images"), list[int]()
    run = ExportedModel.run

    def counted(self: ExportedModel, images: np.ndarray) -> Any:
        calls.append(len(images))
        if len(calls) == allowed:
            raise KeyboardInterrupt
        return run(self, images)

    monkeypatch.setattr(ExportedModel, "run", counted)
    out, allowed = tmp_path / "whole.parquet", 0
    predict_into(out, [source], model)
    assert len(calls) == 9
    expected = out.read_bytes()
    for place in (1, 2, 4, 8, 9):
        calls.clear()
        out, allowed = tmp_path / f"{place}.parquet", place
        out.write_bytes(b"of before")
        with pytest.raises(KeyboardInterrupt):
            predict_into(out, [source], model)
        assert out.read_bytes() == b"of before"
        calls.clear()
        allowed = 0
        predict_into(out, [source], model)
        assert out.read_bytes() == expected
        assert len(calls) == 9 - 2 * max(0, (place - 2) // 2)


@pytest.mark.parametrize("change", ["images", "model"])
def test_parts_of_something_else_are_not_continued(
    change: str, model: ExportedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = as_folder(pixels(20), tmp_path / "images"), tmp_path / "out.parquet"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(batch, "_join", killed)
        with pytest.raises(KeyboardInterrupt):
            predict_into(out, [folder], model)
    if change == "images":
        (folder / "1" / "0015.png").write_bytes(b"another")
    else:
        model = read_export(write_small_export(tmp_path / "other", seed=1))
    said = rf"\.out\.parquet\.parts: was begun with (another model|other {change}); remove it to begin anew"
    with pytest.raises(UserError, match=said):
        predict_into(out, [folder], model)
    assert not out.exists()


def write_odd(path: Path) -> dict[str, Path]:
    """Write files that hold no images of the model's; return them by what is said of each."""
    pq.write_table(pa.table({"imag": [b""]}), path / "a.parquet")
    pq.write_table(pa.table({"image": [1]}), path / "b.parquet")
    pq.write_table(pa.table({"image": pa.array([b"abc"], pa.binary(3))}), path / "c.parquet")
    (path / "d.parquet").write_bytes(b"PAR1")
    np.savez(path / "e.npz", images=np.zeros((3, 8, 8), np.uint8))
    np.savez(path / "f.npz", image=np.zeros((3, 28, 28), np.uint8))
    (path / "g.npz").write_bytes(b"PK")
    np.savez(path / "h.npz", images=np.zeros((2, 28, 28), object), allow_pickle=True)
    for name, count in (("l", 10**15), ("m", -5)):
        with zipfile.ZipFile(path / f"{name}.npz", "w") as archive, archive.open("images.npy", "w") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (count, 28, 28)}
            np.lib.format.write_array_header_1_0(file, header)
    np.savez_compressed(path / "n.npz", images=np.zeros((300, 28, 28), np.uint8))
    data = bytearray((path / "n.npz").read_bytes())
    data[60:100] = bytes([255]) * 40
    (path / "n.npz").write_bytes(data)
    pq.write_table(pa.Table.from_arrays([pa.array([b""])] * 2, names=["image", "image"]), path / "o.parquet")
    (path / "empty").mkdir()
    np.savez(path / "i.npz", images=np.zeros((0, 28, 28), np.uint8))
    return {
        "a.parquet: has no column 'image'; it has imag; did you mean 'imag'?": path / "a.parquet",
        "b.parquet: column image is int64; must be binary (image files), or 784 uint8 pixels": path / "b.parquet",
        "c.parquet: column image is fixed_size_binary[3]; must be": path / "c.parquet",
        "d.parquet: not a readable parquet file: ": path / "d.parquet",
        "e.npz: images is uint8 (3, 8, 8); must be uint8 (images, 28, 28)": path / "e.npz",
        "f.npz: has no array 'images'": path / "f.npz",
        "g.npz: not a readable npz: ": path / "g.npz",
        "h.npz: images is object (2, 28, 28); must be uint8": path / "h.npz",
        "empty: no images (.png, .jpg": path / "empty",
        "i.npz: no images": path / "i.npz",
        "l.npz: damaged: images has 0 bytes": path / "l.npz",
        "m.npz: damaged: images has 0 bytes": path / "m.npz",
        "n.npz: not a readable npz: ": path / "n.npz",
        "o.parquet: has 2 columns 'image'; must have one": path / "o.parquet",
        "j.npz: no such file": path / "j.npz",
        "k.parquet: no such file": path / "k.parquet",
    }


def test_what_holds_no_images_is_one_line_and_writes_nothing(model: ExportedModel, tmp_path: Path) -> None:
    for said, source in write_odd(tmp_path).items():
        with pytest.raises(UserError, match=re.escape(said)):
            predict_into(tmp_path / "new" / "out.parquet", [source], model)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("form", ["npz", "parquet of binary"])
def test_an_input_is_never_written_to(form: str, model: ExportedModel, tmp_path: Path) -> None:
    source = FORMS[form](pixels(3), tmp_path / "images")
    before = source.read_bytes()
    with pytest.raises(UserError, match="is one of the inputs; name another file"):
        predict_into(source, [source], model)
    assert source.read_bytes() == before


def test_a_run_that_was_killed_at_once_is_begun_anew(model: ExportedModel, tmp_path: Path) -> None:
    (tmp_path / ".out.parquet.parts").mkdir()
    predict_into(tmp_path / "out.parquet", [as_npz(pixels(3), tmp_path / "images")], model)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("form", ["npz", "parquet of binary"])
def test_damage_inside_a_table_is_one_line(form: str, model: ExportedModel, tmp_path: Path) -> None:
    source = FORMS[form](pixels(60), tmp_path / "images")
    data = bytearray(source.read_bytes())
    data[3000:3400] = bytes(400)
    source.write_bytes(data)
    with pytest.raises(UserError, match=r"images\.\w+: damaged: "):
        predict_into(tmp_path / "out.parquet", [source], model)
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.slow
@on_linux
def test_memory_does_not_grow_with_the_images(
    model: ExportedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "BATCH_SIZE", 1024)
    monkeypatch.setattr(batch, "PART_SIZE", 4096)
    count = 150_000  # 118 MB
    np.savez(tmp_path / "a.npz", images=np.broadcast_to(pixels(1), (count, 28, 28)))
    column = pa.FixedSizeListArray.from_arrays(np.tile(pixels(1).ravel(), count // 10), 784)
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema({"image": column.type})) as writer:
        for _ in range(10):
            writer.write_table(pa.table({"image": column}))
    predict_into(tmp_path / "warm.parquet", [as_npz(pixels(2000), tmp_path / "b")], model)
    for name in ("a.npz", "a.parquet"):
        assert (
            taken_bytes(lambda name=name: predict_into(tmp_path / "out.parquet", [tmp_path / name], model)) < 64 << 20
        )


@pytest.mark.slow
def test_a_real_kill_loses_no_finished_part(export: Path, tmp_path: Path) -> None:
    source = as_npz(np.broadcast_to(pixels(1), (400_000, 28, 28)), tmp_path / "images")
    command = [sys.executable, "-m", "gradtrail", "predict", str(source), "--model", str(export), "--out"]
    folder = ROOT / "src"

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, str(tmp_path / name)], cwd=folder, stderr=subprocess.PIPE)

    killed, parts = start("killed.parquet"), tmp_path / ".killed.parquet.parts"
    while len([*parts.glob("*.arrow")]) < 3:
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    finished = {path: path.stat().st_mtime_ns for path in parts.glob("*.arrow")}
    assert not (tmp_path / "killed.parquet").exists()
    assert finished
    for name in ("killed.parquet", "whole.parquet"):
        done = start(name)
        said = done.communicate()[1].decode()
        assert not done.returncode
        assert ("predict: 000000" in said) == (name == "whole.parquet"), "a finished part is not made again"
    assert (tmp_path / "killed.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
