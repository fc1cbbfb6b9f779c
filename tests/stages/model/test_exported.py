"""An exported model round-trips, or is refused in one line; the lines of the docs need no gradtrail."""

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import files, requires
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
from exports import SHAPE, write_small_export, write_wrong_export
from projects import ROOT

from gradtrail.core import export
from gradtrail.stages.common.files import write_json
from gradtrail.stages.model.exported import are_probabilities, read_export, read_manifest
from gradtrail.support.errors import UserError

IMAGES = np.random.default_rng(0).integers(0, 256, (11, *SHAPE), np.uint8)
NEEDED = ("jax", "jaxlib", "numpy", "flatbuffers", "safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_small_export(tmp_path / "models" / "export", model="linear", batch_sizes=(2, 4))


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
    changes = ({"seed": 1}, {"temperature": 2.0}, {"name": "other"}, {"members": 2}, {"always": 7}, {"model": "mlp"})
    digests = set()
    for number, other in enumerate(changes):
        options: dict[str, Any] = {"model": "linear", "batch_sizes": (2, 4)} | other
        digests.add(read_manifest(write_small_export(tmp_path / str(number), **options)).digest)
    assert len(digests - {before.digest}) == len(changes)


def test_probabilities_are_not_below_0_and_sum_to_1() -> None:
    right = [[0.25, 0.25, 0.5], [1.0, 0.0, 0.0], [0.3333, 0.3333, 0.3333]]
    wrong = [[0.0, 0.0, 0.0], [0.5, 0.5, 0.5], [2.0, -1.0, 0.0], [np.nan, 0.5, 0.5], [np.inf, -np.inf, 1.0]]
    assert are_probabilities(np.array([*right, *wrong], np.float32)).tolist() == [True] * 3 + [False] * 5


@pytest.mark.parametrize("answers", ["NaN", "-1 to 2"])
def test_answers_that_are_no_probabilities_are_refused_in_one_line(
    answers: Literal["NaN", "-1 to 2"], tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match="digits: its answers to 11 of 11 images are not probabilities, such as"
    ) as error:
        read_export(write_wrong_export(tmp_path / "wrong", answers=answers)).predict(IMAGES)
    assert "\n" not in str(error.value)


def test_program_of_another_type_is_refused(tmp_path: Path) -> None:
    right = export.forward

    def other(*arguments: Any) -> Callable[..., Any]:
        return lambda *inputs: right(*arguments)(*inputs).astype("float16")

    with mock.patch.object(export, "forward", other):
        folder = write_small_export(tmp_path / "export", model="linear")
    with pytest.raises(UserError, match=r"which are not those of manifest\.json"):
        read_export(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "manifest.json").unlink(),
            "manifest.json: no such file; `dvc repro export` makes it",
        ),
        (lambda folder: (folder / "manifest.json").write_text("{"), "no exported model"),
        (lambda folder: change(folder, format=2), "format 2; this version reads format 1"),
        (lambda folder: change(folder, surplus=1), "no exported model"),
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
    with pytest.raises(UserError) as caught:
        read_export(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@functools.cache
def distributions(*names: str) -> frozenset[str]:
    """Return packages and those that they require, extras aside."""
    packages = set(names)
    for name in names:
        needed = [line for line in requires(name) or [] if "extra ==" not in line]
        packages |= distributions(*(line.split(">")[0].split("<")[0].split("=")[0].strip(" ;!~") for line in needed))
    return frozenset(packages)


@pytest.fixture
def only_needed(tmp_path: Path) -> Path:
    """A folder of packages with what an export needs, and nothing else."""
    place = tmp_path / "packages"
    place.mkdir()
    for name in distributions(*NEEDED):
        tops = {path.parts[0]: path for path in files(name) or () if path.parts[0] not in ("..", "__pycache__")}
        for top, path in tops.items():
            installed = Path(str(path.locate())).parents[len(path.parts) - 1] / top
            if not (place / top).exists():
                (place / top).symlink_to(installed)
    return place


def test_lines_of_the_docs_load_it_with_four_packages_alone(tmp_path: Path, only_needed: Path) -> None:
    folder = write_small_export(tmp_path / "models" / "export", batch_sizes=(8,))
    page = (ROOT / "docs/release.md").read_text(encoding="utf-8")
    (snippet,) = (part.split("```")[0] for part in page.split("```python\n")[1:])
    code = f"""
import importlib.util, sys
sys.path.insert(0, {str(only_needed)!r})
found = {{name for name in ("flax", "gradtrail", "jaxtyping", "mlflow", "optax") if importlib.util.find_spec(name)}}
assert not found, found
exec({snippet!r})
print(labels)
images[:] = np.load("images.npy")[:8]
np.save("probabilities.npy", forward(tensors, images))
"""
    np.save(tmp_path / "images.npy", IMAGES)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    blank = read_export(folder).predict(np.zeros((8, *SHAPE), np.uint8)).argmax(axis=1)
    assert done.stdout.strip() == str([str(label) for label in blank])
    np.testing.assert_array_equal(np.load(tmp_path / "probabilities.npy"), read_export(folder).predict(IMAGES[:8]))
