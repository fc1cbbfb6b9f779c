"""`gradtrail export --onnx`: a file that is as good as the export, or none."""

import sys
from pathlib import Path

import pytest
from factories import ROOT
from projects import finished_project


@pytest.mark.nightly
def test_onnx_answers_as_the_export_or_is_not_written(tmp_path: Path) -> None:
    project = finished_project().copy(tmp_path / "project")
    (project.folder / "locks").mkdir()
    (project.folder / "locks/onnx.lock").write_bytes((ROOT / "locks/onnx.lock").read_bytes())

    def export(name: str, status: int) -> str:
        arguments = ("-m", "gradtrail", "export", "--onnx", name)
        return project.run(sys.executable, *arguments, env={"PYTHONPATH": "src"}, status=status)

    project.set("train.precision", "float16")
    project.dvc("repro", "export")
    assert "train.precision float32 alone; this one has float16" in export("digits.onnx", 2)
    project.set("train.precision", "float32")
    project.dvc("repro", "export")
    output = export("digits.onnx", 0)
    assert "differs from models/export by at most" in output
    # The weights of another training, and the export of the first one
    project.set("train.seed", 7)
    project.dvc("repro", "evaluate")
    assert "`dvc repro export` brings the export up to date" in export("other.onnx", 2)
    assert [path.name for path in project.folder.glob("*.onnx")] == ["digits.onnx"]
