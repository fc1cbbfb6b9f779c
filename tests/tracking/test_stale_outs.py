"""Outputs are of an earlier model exactly if they read other weights, or another evaluation, than those that exist."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from factories import ROOT

from gradtrail.stages.common.files import digest, write_json
from gradtrail.stages.common.params import PARAMS, validate
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.data.data_files import FILES
from gradtrail.stages.image_files import SOURCES, PicturesConfig, file_table
from gradtrail.tracking.stale_outs import warn_of_earlier_model, warn_of_other_files

READ = {
    "export": ("models/final.safetensors", "results/evaluate/calibration.json"),
    "report": ("models/final.safetensors", "data/raw"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in {*READ["export"], *READ["report"], "models/export", "results/report.html"}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("first")
    stages = {
        stage: {"cmd": stage, "deps": [{"path": path, "md5": digest(tmp_path / path)} for path in paths]}
        for stage, paths in READ.items()
    }
    (tmp_path / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": stages}))
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "outs"),
    [
        ("data/raw", ""),
        ("models/final.safetensors", "models/export, results/report.html"),
        ("results/evaluate/calibration.json", "models/export"),
    ],
)
def test_outputs_of_earlier_weights_are_named(
    changed: str, outs: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_earlier_model(folder)
    assert capsys.readouterr().out == ""
    (folder / changed).write_text("second")
    warn_of_earlier_model(folder)
    line = f"An earlier model made {outs}; `dvc repro` makes them again.\n"
    assert capsys.readouterr().out == (line if outs else "")


def test_nothing_is_said_without_a_lock_or_of_a_missing_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "models/final.safetensors").write_text("second")
    (folder / "results/report.html").unlink()
    warn_of_earlier_model(folder)
    assert capsys.readouterr().out.startswith("An earlier model made models/export;")
    (folder / "dvc.lock").unlink()
    warn_of_earlier_model(folder)
    assert capsys.readouterr().out == ""


CSV = "path,label,split\na/0,a,train\nb/0,b,train\na/1,a,test\nb/1,b,test\n"
OTHERS: dict[str, Callable[[Path], object]] = {
    "none": lambda folder: (folder / "a/0").touch(),
    "hidden": lambda folder: (folder / "a/.DS_Store").touch(),
    "new": lambda folder: (folder / "a/2").touch(),
    "gone": lambda folder: (folder / "a/1").unlink(),
    "larger": lambda folder: (folder / "a/1").write_text("other"),
    "nowhere": shutil.rmtree,
    "no class": lambda folder: [shutil.rmtree(folder / name) for name in "ab"],
    "another class": lambda folder: (folder / "list.csv").write_text(CSV.replace("a/1,a", "a/1,b")),
    "another split": lambda folder: (folder / "list.csv").write_text(CSV.replace("b,test", "b,train")),
}


@pytest.mark.parametrize("dataset", SOURCES)
@pytest.mark.parametrize("change", OTHERS)
def test_other_image_files_than_those_read_are_one_line(
    dataset: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line does not come without the variable, or for another data set."""
    for name in ("a/0", "a/1", "b/0", "b/1"):
        (tmp_path / "images" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "images" / name).touch()
    (tmp_path / "images/list.csv").write_text(CSV)
    variable, source = {"folder": ("IMAGES_DIR", "images"), "csv": ("IMAGES_CSV", "images/list.csv")}[dataset]
    monkeypatch.setenv(variable, str(tmp_path / source))
    fetch = read_yaml(ROOT / PARAMS)["fetch"]
    pictures = validate(fetch["pictures"], PicturesConfig, "fetch.pictures")
    write_json(
        tmp_path / "data/raw" / FILES, file_table(tmp_path / source, SOURCES[dataset](tmp_path / source), pictures)
    )
    write_json(tmp_path / PARAMS, {"fetch": fetch | {"dataset": dataset}})

    OTHERS[change](tmp_path / "images")
    warn_of_other_files(tmp_path)
    in_all, in_csv = ("gone", "larger", "nowhere", "no class"), ("another class", "another split")
    line = f"warning: {variable}={tmp_path / source} has other files than fetch read; --force reads them\n"
    is_told = change in (*in_all, *(in_csv if dataset == "csv" else ("new",)))
    assert capsys.readouterr().out == line * is_told
    monkeypatch.delenv(variable)
    warn_of_other_files(tmp_path)
    monkeypatch.setenv(variable, str(tmp_path))
    write_json(tmp_path / PARAMS, {"fetch": fetch})
    warn_of_other_files(tmp_path)
    assert capsys.readouterr().out == ""
