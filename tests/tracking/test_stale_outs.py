"""Outputs are of an earlier model exactly if they read other weights, or another evaluation, than those that exist."""

import json
from pathlib import Path

import pytest

from gradtrail.stages.common.files import digest
from gradtrail.tracking.stale_outs import warn_of_earlier_model

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
    line = f"{outs}: of an earlier model, until `dvc repro` updates them\n"
    assert capsys.readouterr().out == (line if outs else "")


def test_nothing_is_said_without_a_lock_or_of_a_missing_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "models/final.safetensors").write_text("second")
    (folder / "results/report.html").unlink()
    warn_of_earlier_model(folder)
    assert capsys.readouterr().out.startswith("models/export: ")
    (folder / "dvc.lock").unlink()
    warn_of_earlier_model(folder)
    assert capsys.readouterr().out == ""
