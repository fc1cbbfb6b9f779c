"""`gradtrail predict` on an exported model: the model's answers for every source of images; errors."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exports import write_small_export, write_wrong_export
from factories import ROOT, image_file
from fuzzing import on_linux, taken_bytes
from PIL import Image
from rich.console import Console

from gradtrail import cli
from gradtrail.core.xla import passes
from gradtrail.serving import predict as predicting
from gradtrail.serving.predict import predict, predict_into
from gradtrail.stages.model.exported import ExportedModel, read_export
from gradtrail.support.errors import UserError

CLASSES = tuple(rf"[{letter}]$\frac$" for letter in "abcdefghij")  # no markup of Rich, no formula of Matplotlib


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_export(tmp_path_factory.mktemp("model") / "export")


@pytest.fixture
def model(export: Path) -> ExportedModel:
    return read_export(export)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of two batches of eight images; pixels are read in two batches."""
    monkeypatch.setattr(predicting, "BATCH_SIZE", 8)
    monkeypatch.setattr(predicting, "PIXEL_BATCHES", 2)
    monkeypatch.setattr(predicting, "BATCHES_PER_GROUP", 2)


@pytest.fixture(scope="module")
def color_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    about = {"image_shape": (28, 28, 3), "classes": CLASSES, "dataset": "folder 1234abcd"}
    return write_small_export(tmp_path_factory.mktemp("color") / "export", model="cnn", **about)


def pixels(count: int, *channels: int) -> np.ndarray:
    """Return images with something bright inside a black edge, so that their files are used unchanged."""
    images = np.zeros((count, 28, 28, *channels), np.uint8)
    images[:, 4:24, 4:24] = np.random.default_rng(0).integers(100, 256, (count, 20, 20, *channels))
    return images


def as_folder(images: np.ndarray, path: Path) -> list[Path]:
    for number, image in enumerate(images):
        file = path / f"{number // 10}" / f"{number:04d}.PNG"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image_file(image))
    (path / "notes.txt").write_text("no image")
    return [path]


def as_parquet(images: np.ndarray, path: Path) -> list[Path]:
    table = pa.table({"label": np.zeros(len(images)), "image": [image_file(image) for image in images]})
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=11)
    return [path.with_suffix(".parquet")]


def as_pixels(images: np.ndarray, path: Path) -> list[Path]:
    column = pa.array([image.tobytes() for image in images], pa.binary(images[0].size))
    pq.write_table(pa.table({"image": column}), path.with_suffix(".parquet"), row_group_size=11)
    return [path.with_suffix(".parquet")]


@pytest.mark.parametrize("channels", [(), (3,)])
def test_answers_are_those_of_the_model_for_every_source(
    channels: tuple[int, ...], export: Path, color_export: Path, tmp_path: Path
) -> None:
    """Image files, a folder of them, a table of them, and a table of pixels."""
    images, model = pixels(63, *channels), read_export(color_export if channels else export)
    (folder,) = as_folder(images[:22], tmp_path / "images")
    files, tables = (
        sorted(folder.rglob("*.PNG")),
        [*as_parquet(images[22:42], folder), *as_pixels(images[42:], folder / "a")],
    )
    out = tmp_path / "new" / "out.parquet"
    assert not predict_into(out, [*files[:10], folder / "1", folder / "2", *tables], model, "3")
    table = pq.read_table(out)
    expected = model.predict(images)
    probabilities = np.stack(table["probabilities"].to_numpy())
    np.testing.assert_allclose(probabilities, expected, rtol=1e-5)
    np.testing.assert_array_equal(table["label"], expected.argmax(axis=1))
    np.testing.assert_array_equal(table["confidence"], probabilities.max(axis=1))
    assert table["class"].to_pylist() == [model.manifest.classes[label] for label in expected.argmax(axis=1)]
    assert table["error"].null_count == len(images)
    assert table["path"].to_pylist() == [*map(str, files), *[str(tables[0])] * 20, *[str(tables[1])] * 21]
    assert table["index"].to_pylist() == [*[None] * 22, *range(20), *range(21)]
    about = table.schema.metadata
    assert about[b"gradtrail.model_digest"].decode() == model.manifest.digest
    assert about[b"gradtrail.model"] == b"digits version 3"
    assert json.loads(about[b"gradtrail.classes"]) == [*model.manifest.classes]
    assert [path.name for path in out.parent.iterdir()] == ["out.parquet"]


def test_large_images_are_answered_in_smaller_batches(
    model: ExportedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, sizes = pixels(20), set[int]()
    monkeypatch.setattr(passes, "TEMPORARY_BYTES", {"cpu": model.compile(8) // 2})
    monkeypatch.setattr(model, "run", lambda part: sizes.add(len(part)) or ExportedModel.run(model, part))
    predict_into(tmp_path / "out.parquet", as_parquet(images, tmp_path / "images"), model)
    assert len(sizes) == 1
    assert sizes < {1, 2, 4}
    answers = np.stack(pq.read_table(tmp_path / "out.parquet")["probabilities"].to_numpy())
    np.testing.assert_allclose(answers, model.predict(images), rtol=1e-5)


def test_unusable_images_are_rows_with_their_reason(model: ExportedModel, tmp_path: Path) -> None:
    images = pixels(40)
    cells: list[Any] = [*map(image_file, images)]
    cells[3], cells[9], cells[20], cells[39] = b"no image", None, image_file(np.zeros_like(images[0])), cells[39][:60]
    pq.write_table(pa.table({"image": cells}), tmp_path / "a.parquet")
    assert predict_into(tmp_path / "out.parquet", [tmp_path / "a.parquet"], model) == 4
    table = pq.read_table(tmp_path / "out.parquet")
    errors = {place: error for place, error in enumerate(table["error"].to_pylist()) if error}
    assert [*errors] == [3, 9, 20, 39]
    assert (errors[9], errors[20][:19]) == ("no image", "the image is blank:")
    assert errors[3].startswith("not a readable image: none of PNG")
    assert errors[39].startswith("not a readable image: ")
    for name in ("label", "class", "confidence"):
        assert [*np.flatnonzero(table[name].is_null())] == [*errors]
    assert [*np.flatnonzero(np.isnan(np.stack(table["probabilities"].to_numpy())).all(axis=1))] == [*errors]
    rest = np.delete(np.arange(40), [*errors])
    probabilities = np.stack(table["probabilities"].take(rest).to_numpy())
    np.testing.assert_allclose(probabilities, model.predict(images[rest]), rtol=1e-5)


def test_table_is_replaced_once_it_is_complete(
    model: ExportedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, out, calls = as_folder(pixels(40), tmp_path / "images"), tmp_path / "out.parquet", list[int]()
    out.write_bytes(b"of before")

    def interrupted(images: np.ndarray) -> Any:
        calls.append(len(images))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return ExportedModel.run(model, images)

    with monkeypatch.context() as patched:
        patched.setattr(model, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            predict_into(out, sources, model)
    assert (out.read_bytes(), [*tmp_path.glob(".*")]) == (b"of before", [])
    predict_into(out, sources, model)
    first = out.read_bytes()
    predict_into(out, sources, model)
    assert out.read_bytes() == first, "only images and model decide the bytes"


def test_source_without_images_is_one_line_and_writes_nothing(model: ExportedModel, tmp_path: Path) -> None:
    lists, narrow = pa.array([[1]], pa.list_(pa.uint8())), pa.array([bytes(9)], pa.binary(9))
    expected = "must be binary (image files) or fixed_size_binary[784] (pixels)"
    columns = {
        "has no column 'image'; it has imag; did you mean 'imag'?": {"imag": [b""]},
        f"column image is list<element: uint8>; {expected}": {"image": lists},
        f"column image is fixed_size_binary[9]; {expected}": {"image": narrow},
        "no images (.png, .jpg": {"image": pa.array([], pa.binary())},
    }
    sources = [tmp_path / f"{number}.parquet" for number in range(len(columns))]
    for source, table in zip(sources, columns.values(), strict=True):
        pq.write_table(pa.table(table), source)
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    (tmp_path / "empty").mkdir()
    unreadable = "not a readable parquet file: "
    others = {"d.parquet": unreadable, "k.parquet": unreadable, "empty": "no images (.png, .jpg"}
    messages = dict(zip(sources, columns, strict=True)) | {tmp_path / name: message for name, message in others.items()}
    for source, message in messages.items():
        with pytest.raises(UserError, match=re.escape(f"{source}: {message}")):
            predict_into(tmp_path / "new" / "out.parquet", [source], model)
    assert not (tmp_path / "new").exists()


def test_input_and_damaged_input_overwrite_nothing(model: ExportedModel, tmp_path: Path) -> None:
    (source,) = as_parquet(pixels(60), tmp_path / "images")
    data = bytearray(source.read_bytes())
    with pytest.raises(UserError, match="is one of the inputs; name another file"):
        predict_into(source, [source], model)
    assert source.read_bytes() == data
    data[3000:3400] = bytes(400)
    source.write_bytes(data)
    nulls = tmp_path / "nulls.parquet"
    pq.write_table(pa.table({"image": pa.array([bytes(784), None], pa.binary(784))}), nulls)
    for path, message in {source: "", nulls: "column image has pixels that are null"}.items():
        with pytest.raises(UserError, match=f"{path.name}: not a readable parquet file: {message}"):
            predict_into(tmp_path / f"{path.name}.out", [path], model)
        assert not (tmp_path / f"{path.name}.out").exists()


@pytest.mark.slow
@on_linux
def test_memory_does_not_grow_with_the_images(
    model: ExportedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicting, "BATCH_SIZE", 1024)
    image = image_file(pixels(1)[0]) + bytes(4000)
    table = pa.table({"image": [image] * 10_000})
    for copies in (1, 6):  # 47 and 280 MB; the first fills the buffers of the pipeline and the allocators' pools
        path = tmp_path / f"{copies}.parquet"
        with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
            for _ in range(copies):
                writer.write_table(table, row_group_size=1000)
        taken = taken_bytes(lambda path=path: predict_into(tmp_path / "out.parquet", [path], model))
    assert taken < 96 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two images, `a.png` and `b.png`, and `c.png`, which is none."""
    image = np.zeros((28, 28), np.uint8)
    image[5:20, 10:14] = 200
    for name in ("a.png", "b.png"):
        Image.fromarray(image).save(tmp_path / name)
    (tmp_path / "c.png").write_bytes(b"none")
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command in the project's folder: arguments → exit status, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr("sys.argv", ["gradtrail", "predict", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


Run = Callable[..., tuple[int, str, str]]


def test_unusable_images_are_reported_after_the_answers(folder: Path, run: Run) -> None:
    export = write_small_export(folder / "export", always=7, members=2)
    files = [folder / name for name in ("a.png", "c.png", "b.png")]
    status, out, err = run(*files, "--model", export, "--figure", folder / "seen.png")
    lines = out.splitlines()
    assert status == 2
    assert [line.split("%")[0] for line in lines[:2]] == [f"{path}: 7  100.0" for path in (files[0], files[2])]
    assert re.search(r"%  \(then \d 0\.0%, \d 0\.0%\)$", lines[0])
    assert lines[2] == "probabilities are the mean of 2 networks, calibrated (temperature 1.5, fitted to 100 images)"
    assert err.splitlines() == [f"gradtrail: {files[1]}: not a readable image: none of PNG, JPEG, BMP, TIFF, WEBP"]
    with Image.open(folder / "seen.png") as figure:
        assert min(figure.size) > 100


def test_folder_becomes_a_table_with_progress_in_lines(folder: Path, export: Path, run: Run) -> None:
    target = folder / "out.parquet"
    status, out, err = run(folder, "--model", export, "--out", target)
    assert status == 2
    assert out.startswith(f"{target}: 3 images, 1 of them without an answer (column error); ")
    assert err.startswith("predict: out.parquet (100 %, ")
    assert [error is None for error in pq.read_table(target)["error"].to_pylist()] == [True, True, False]


def test_model_without_probabilities_gives_no_label(folder: Path, run: Run) -> None:
    wrong = write_wrong_export(folder / "model", answers="-1 to 2")
    status, out, err = run(folder / "a.png", "--model", wrong)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("gradtrail: digits: its answers to 1 of 1 images are not probabilities, such as [")
    assert run(folder, "--model", wrong, "--out", folder / "out.parquet")[0] == 2
    table = pq.read_table(folder / "out.parquet")
    assert table["label"].null_count == table["confidence"].null_count == 3
    errors = table["error"].to_pylist()
    assert errors[:2] == ["the model's answer is not a probability for each class"] * 2
    assert errors[2].startswith("not a readable image")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["."], ".: a folder or table of images; --out FILE.parquet takes the answers"),
        (["a.parquet"], "a.parquet: a folder or table of images; --out FILE.parquet takes the answers"),
        ([".", "--out", "out.parquet", "--figure", "b.png"], "--figure: only without --out"),
        (["a.png", "--model", "nowhere"], "nowhere: no exported model here (no manifest.json)"),
        ([".", "--out", "src", "--model", "EXPORT"], "src: a folder; name a file, such as src/predictions.parquet"),
    ],
)
def test_mistake_is_one_line_with_status_2(arguments: list[str], message: str, export: Path, run: Run) -> None:
    status, out, err = run(*(export if argument == "EXPORT" else argument for argument in arguments))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"gradtrail: {message}")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    """Make `predict` print on a terminal of so many columns and colors; returns its output."""

    def make(colors: str, width: int = 80) -> io.StringIO:
        output = io.StringIO()
        console = Console(file=output, force_terminal=True, color_system=colors, width=width, legacy_windows=False)  # type: ignore[arg-type]
        monkeypatch.setattr(predicting, "stdout_console", lambda: console)
        return output

    return make


def test_predict_draws_the_image_in_color_and_names_the_class(
    color_export: Path, terminal: Callable[..., io.StringIO], tmp_path: Path
) -> None:
    (image,) = np.random.default_rng(0).integers(0, 256, (1, 28, 28, 3), dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(image_file(image))
    output = terminal("truecolor")
    assert not predict([tmp_path / "a.png"], str(color_export), tmp_path, figure=tmp_path / "figure.png")
    text = output.getvalue()
    for row in range(0, 28, 2):
        for column in range(28):
            upper, lower = (";".join(map(str, image[each, column])) for each in (row, row + 1))
            assert f"\x1b[38;2;{upper};48;2;{lower}m▀" in text.splitlines()[row // 2]
    label = read_export(color_export).predict(image[None]).argmax()
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert f"a.png: {CLASSES[label]}  " in plain
    drawn = np.asarray(Image.open(tmp_path / "figure.png").convert("RGB"), int)
    assert np.ptp(drawn, axis=2).max() > 100, "the figure is in color"


def test_image_is_drawn_within_the_width_and_colors_of_the_terminal(terminal: Callable[..., io.StringIO]) -> None:
    wide = np.zeros((30, 100, 3), np.uint8)
    wide[..., 0] = 255
    for colors, width, expected in (("256", 100, 100), ("256", 40, 34), ("standard", 80, 50)):
        output = terminal(colors, width)
        predicting._print_image(wide, predicting.stdout_console())
        lines = output.getvalue().splitlines()
        assert [line.count("▀") for line in lines] == [expected] * len(lines)
        assert ("196" in lines[0]) == (colors == "256"), "red, or its luminance"
