"""`gradtrail export --onnx`: a file that is as good as the export, or none."""

import json
import sys
import sysconfig
from pathlib import Path

import pytest
from factories import ROOT
from projects import finished_project

from gradtrail.serving import onnx
from gradtrail.support.git import run, uv


def editable(folder: Path, source: Path) -> Path:
    """Return the interpreter of an environment that has the packages of this one, and `source` by a .pth file."""
    uv("venv", "--quiet", "--python", sys.executable, str(folder))
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "_gradtrail.pth").write_text(str(source))
    (site / "packages.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (folder / "bin/uv").symlink_to(Path(sys.executable).with_name("uv"))
    return folder / "bin/python"


def test_environment_of_onnx_has_the_code_that_an_editable_install_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `src` on the path; packages of the lock come first."""
    for name in ("PYTHONPATH", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    python = editable(tmp_path / ".venv", ROOT / "src")
    Path("locks").mkdir()
    Path("locks/onnx.lock").touch()
    made = run([str(python), "-c", "from gradtrail.serving.onnx import make_environment; print(make_environment())"])
    (own,) = (tmp_path / ".gradtrail/onnx").glob("*/lib/python*/site-packages")
    (own / "orjson.py").touch()  # as a package of the lock
    code = "import gradtrail.serving.onnx as onnx, orjson, json; print(json.dumps([onnx.__file__, orjson.__file__]))"
    output = run([made.decode().strip(), "-c", code])
    assert json.loads(output) == [onnx.__file__, str(own / "orjson.py")]


@pytest.mark.nightly
def test_onnx_answers_as_the_export_or_is_not_written(tmp_path: Path) -> None:
    project = finished_project().copy(tmp_path / "project")
    (project.folder / "locks").mkdir()
    (project.folder / "locks/onnx.lock").write_bytes((ROOT / "locks/onnx.lock").read_bytes())
    python = editable(project.folder / ".venv", project.folder / "src")

    def export(name: str, status: int) -> str:
        return project.run(str(python), "-m", "gradtrail", "export", "--onnx", name, status=status)

    project.set("train.precision", "float16")
    project.dvc("repro", "export")
    assert "train.precision float32 alone; this one has float16" in export("digits.onnx", 2)
    project.set("train.precision", "float32")
    project.set("train.model", "cnn")
    project.set("train.members", 2)
    project.dvc("repro", "export")
    output = export("digits.onnx", 0)
    assert "differs from models/export by at most" in output
    # The weights of another training, and the export of the first one
    project.set("train.seed", 7)
    project.dvc("repro", "evaluate")
    assert "`dvc repro export` brings the export up to date" in export("other.onnx", 2)
    assert [path.name for path in project.folder.glob("*.onnx")] == ["digits.onnx"]
