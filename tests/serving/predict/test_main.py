"""`gradtrail predict` on an exported model: answers on the terminal, figures, tables, and errors."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from exports import write_small_export, write_wrong_export
from PIL import Image

from gradtrail import cli
from gradtrail.stages.artifacts.exported import read_export
from gradtrail.support.paths import find_project


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_export(tmp_path_factory.mktemp("model") / "export", always=7, members=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two images, `a.png` and `b.png`, and `c.png`, which is none."""
    image = np.zeros((28, 28), np.uint8)
    image[5:20, 10:14] = 200
    for name in ("a.png", "b.png"):
        Image.fromarray(image).save(tmp_path / name)
    (tmp_path / "c.png").write_bytes(b"none")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.chdir(find_project(Path(__file__).parent))
    monkeypatch.setattr("sys.argv", ["gradtrail", "predict", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_unusable_images_are_reported_after_the_answers(
    folder: Path, export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [folder / name for name in ("a.png", "c.png", "b.png")]
    assert run(monkeypatch, *files, "--model", export, "--figure", folder / "seen.png") == 2
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split("%")[0] for line in lines[:2]] == [f"{path}: 7  100.0" for path in (files[0], files[2])]
    assert lines[2] == "probabilities are the mean of 2 networks, calibrated (temperature 1.5)"
    assert err.splitlines() == [f"gradtrail: {files[1]}: not a readable image: none of PNG, JPEG, BMP, TIFF, WEBP"]
    with Image.open(folder / "seen.png") as figure:
        assert min(figure.size) > 100


def test_folder_becomes_a_table_with_progress_in_lines(
    folder: Path, export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = folder / "out.parquet"
    assert run(monkeypatch, folder, "--model", export, "--out", target) == 2
    out, err = capsys.readouterr()
    assert out.startswith(f"{target}: 3 images, 1 of them without an answer (column error); ")
    assert err.startswith("predict: 000000 (100 %, ")
    table = pq.read_table(target)
    assert table["class"].to_pylist() == ["7", "7", None]
    assert table.schema.metadata[b"gradtrail.model_digest"].decode() == read_export(export).manifest.digest


def test_model_without_probabilities_gives_no_label(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = write_wrong_export(folder / "model", answers="-1 to 2")
    assert run(monkeypatch, folder / "a.png", "--model", wrong) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("gradtrail: digits: its answers to 1 of 1 images are not probabilities, such as [")
    assert run(monkeypatch, folder, "--model", wrong, "--out", folder / "out.parquet") == 2
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
def test_mistake_is_one_line_with_status_2(
    arguments: list[str],
    message: str,
    export: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *(export if argument == "EXPORT" else argument for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"gradtrail: {message}")
