"""An exported model round-trips, or is refused in one line; the lines of the docs need no gradtrail."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from exports import SHAPE, write_small_export, write_wrong_export
from fuzzing import refusal
from projects import ROOT

from gradtrail.core import export
from gradtrail.stages.common.files import write_json
from gradtrail.stages.model.exported import are_probabilities, read_export, read_manifest

IMAGES = np.random.default_rng(0).integers(0, 256, (11, *SHAPE), np.uint8)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_export(tmp_path_factory.mktemp("models") / "export", model="linear", batch_sizes=(2, 4))


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy, to damage."""
    return Path(shutil.copytree(written, tmp_path / "models" / "export"))


def change(folder: Path, **values: Any) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text()) | values
    write_json(path, {key: value for key, value in content.items() if value is not None})


def replace(folder: Path, name: str, data: bytes) -> None:
    """Write other bytes to a file, whose digest stands in the manifest."""
    (folder / name).write_bytes(data)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    change(folder, files=files | {name: hashlib.sha256(data).hexdigest()})


def test_any_number_of_images_is_padded_to_the_sizes_of_the_manifest(folder: Path) -> None:
    exported = read_export(folder)
    whole = exported.predict(IMAGES)
    assert whole.shape == (11, 10)
    assert whole.dtype == np.float32
    for count in (0, 1, 2, 3, 4, 5):
        np.testing.assert_allclose(exported.predict(IMAGES[:count]), whole[:count], rtol=1e-5)
    assert exported._compiled.keys() == {2, 4}
    np.testing.assert_array_equal(np.asarray(exported.run(IMAGES[:4])), whole[:4])


def test_digest_is_that_of_all_that_changes_an_answer(folder: Path, tmp_path: Path) -> None:
    before = read_manifest(folder)
    again = write_small_export(tmp_path / "again", model="linear", batch_sizes=(2, 4))
    assert read_manifest(again).digest == before.digest
    changes = ({"seed": 1}, {"temperature": 2.0}, {"name": "other"})
    digests = set()
    for number, other in enumerate(changes):
        options: dict[str, Any] = {"model": "linear", "batch_sizes": (2, 4)} | other
        digests.add(read_manifest(write_small_export(tmp_path / str(number), **options)).digest)
    assert len(digests - {before.digest}) == len(changes)


def test_probabilities_are_not_below_0_and_sum_to_1() -> None:
    right = [[0.25, 0.25, 0.5], [1.0, 0.0, 0.0], [0.3333, 0.3333, 0.3333]]
    wrong = [[0.0, 0.0, 0.0], [0.5, 0.5, 0.5], [2.0, -1.0, 0.0], [np.nan, 0.5, 0.5], [np.inf, -np.inf, 1.0]]
    assert are_probabilities(np.array([*right, *wrong], np.float32)).tolist() == [True] * 3 + [False] * 5


def test_answers_that_are_no_probabilities_are_refused_in_one_line(tmp_path: Path) -> None:
    line = refusal(lambda: read_export(write_wrong_export(tmp_path / "wrong", answers="NaN")).predict(IMAGES))
    assert str(line).startswith("digits: its answers to 11 of 11 images are not probabilities, such as")


def test_program_of_another_type_is_refused(tmp_path: Path) -> None:
    right = export.forward

    def other(*arguments: Any) -> Callable[..., Any]:
        return lambda *inputs: right(*arguments)(*inputs).astype("float16")

    with mock.patch.object(export, "forward", other):
        folder = write_small_export(tmp_path / "export", model="linear")
    assert "which are not those of manifest.json" in str(refusal(lambda: read_export(folder)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "no such file; `dvc repro export` makes it"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "no exported model"),
        (lambda folder: change(folder, format=1), "format 1; this version reads format 2"),
        (lambda folder: change(folder, classes=None), "no exported model"),
        (lambda folder: change(folder, classes=["7"]), "which are not those of manifest.json"),
        (lambda folder: replace(folder, "forward.cpu.bin", bytes(1000)), "cannot read it: "),
        (lambda folder: replace(folder, "weights.safetensors", b"0"), "weights.safetensors: cannot be read: "),
        (lambda folder: change(folder, files={}), "has no forward.cpu.bin; JAX runs on cpu here"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "weights.safetensors: cannot be read"),
        (lambda folder: (folder / "weights.safetensors").write_bytes(b"0"), "damaged: its SHA-256 is not that of"),
    ],
)
def test_damaged_missing_or_newer_export_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    line = str(refusal(lambda: read_export(folder)))
    assert message in line
    assert str(folder) in line


def test_lines_of_the_docs_load_it_without_this_project(tmp_path: Path) -> None:
    folder = write_small_export(tmp_path / "models" / "export", batch_sizes=(8,))
    page = (ROOT / "docs/release.md").read_text(encoding="utf-8")
    (snippet,) = (part.split("```")[0] for part in page.split("```python\n")[1:])
    code = f"""
import sys
sys.modules |= dict.fromkeys(("flax", "gradtrail", "jaxtyping", "mlflow", "optax", "pandas", "pydantic"))
exec({snippet!r})
print(labels)
images[:] = np.load("images.npy")[:8]
np.save("probabilities.npy", forward(tensors, images))
"""
    np.save(tmp_path / "images.npy", IMAGES)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    blank = read_export(folder).predict(np.zeros((8, *SHAPE), np.uint8)).argmax(axis=1)
    assert done.stdout.strip() == str([str(label) for label in blank])
    np.testing.assert_array_equal(np.load(tmp_path / "probabilities.npy"), read_export(folder).predict(IMAGES[:8]))
