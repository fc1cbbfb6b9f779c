"""Weights to start from are taken by path and shape; what does not fit is named, and a file that changed is refused."""

import dataclasses
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import random_params
from factories import model_config
from fuzzing import refusal
from safetensors.numpy import save_file

from gradtrail.core.export import tensors as exported_tensors
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model, by_path
from gradtrail.core.train.start import NO_START, StartConfig
from gradtrail.stages.common.files import digest, read_json
from gradtrail.stages.model.start import Start, read_start

NETWORK = MLP(hidden=(5, 4), activation="relu", dropout=0.0)
MODEL, WITH_MORE_CLASSES = (Model(model_config(NETWORK, num_classes=count)) for count in (3, 7))
PARAMS = random_params(MODEL)
TENSORS: dict[str, np.ndarray] = dict(by_path(PARAMS))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root; an experiment runs in another folder."""
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    return tmp_path


def write(tensors: dict[str, Any]) -> StartConfig:
    """Write a file to the root; return the config that starts from it."""
    path = Path(os.environ["DVC_ROOT"]) / "old.safetensors"
    save_file(tensors, path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return dataclasses.replace(NO_START, weights="old.safetensors", sha256=sha256)


def test_all_tensors_of_the_network_are_taken_to_the_bit(folder: Path) -> None:
    start = read_start(write({**TENSORS, "temperature": np.array(1.5, np.float32)}), MODEL)
    assert start.tensors.keys() == TENSORS.keys()
    assert all(start.tensors[path].tobytes() == leaf.tobytes() for path, leaf in TENSORS.items())
    assert start.config.drawn == ()
    assert start.describe().splitlines()[0] == "old.safetensors: 104 parameters taken"
    assert start.describe().splitlines()[1] == "  layers/0/bias, layers/0/kernel (65): taken"
    assert start.describe().splitlines()[-1] == "  temperature (1): not in the network"
    start.write(folder)
    assert read_json(folder / "start.json") == {
        "md5": digest(folder / "old.safetensors"),
        "sha256": start.config.sha256,
    }
    lines = (folder / "start.csv").read_text().splitlines()
    assert lines[:2] == ["tensor,shape,size,outcome", "layers/0/bias,5,5,taken"]


def test_folder_of_an_export_stands_for_its_weights(folder: Path) -> None:
    config = write(TENSORS)
    (folder / "export").mkdir()
    (folder / "old.safetensors").rename(folder / "export/weights.safetensors")
    assert read_start(dataclasses.replace(config, weights="export"), MODEL).tensors.keys() == TENSORS.keys()


def test_layers_that_do_not_fit_are_drawn_and_said_so() -> None:
    half = {name: leaf.astype(np.float16) for name, leaf in TENSORS.items() if name != "layers/1/bias"}
    start = read_start(write({**half, "layers/0/bias": np.ones(5, np.int32)}), WITH_MORE_CLASSES)
    assert start.tensors.keys() == {"layers/0/kernel", "layers/1/kernel"}
    np.testing.assert_array_equal(start.tensors["layers/1/kernel"], half["layers/1/kernel"].astype(np.float32))
    assert {leaf.dtype for leaf in start.tensors.values()} == {np.dtype(np.float32)}
    assert start.describe() == "\n".join(
        (
            "old.safetensors: 80 parameters taken",
            "  layers/0/bias (5): other type: I32; drawn anew",
            "  layers/0/kernel (60): taken",
            "  layers/1/bias (4): not in the file; drawn anew",
            "  layers/1/kernel (20): taken",
            "  layers/2/bias (7): other shape: (3,) against (7,); drawn anew",
            "  layers/2/kernel (28): other shape: (4, 3) against (4, 7); drawn anew",
        )
    )


def test_tensors_of_bfloat16_are_taken(folder: Path) -> None:
    """The file is written by hand: safetensors writes none from NumPy."""
    header = b'{"layers/1/bias":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}'
    values = np.array([1, -2, 0.5, -0.0], np.float32)
    path = folder / "brain.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + values.view(np.uint16)[1::2].tobytes())
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    start = read_start(dataclasses.replace(NO_START, weights=str(path), sha256=sha256), MODEL)
    assert start.tensors["layers/1/bias"].tobytes() == values.tobytes()


def read(tensors: dict[str, Any] | None = None, model: Model = MODEL, **fields: Any) -> Start:
    return read_start(dataclasses.replace(write(tensors or TENSORS), **fields), model)


HEX = "0" * 64
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "no file": (lambda: read(weights="none"), "train.start.weights: {root}/none: no such file; DVC removes"),
    "a folder": (lambda: read(weights="copy"), "train.start.weights: {root}/copy/weights.safetensors: no such file"),
    "a pickle": (
        lambda: [Path("x.pt").write_bytes(b"PK\x03\x04" * 99), read(weights="copy/x.pt")],
        "train.start.weights: {root}/copy/x.pt: no safetensors file",
    ),
    "no digest": (
        lambda: read(sha256=None),
        "train.start.sha256 must be the digest of {file}, got null: -S train.start",
    ),
    "another file": (lambda: read(sha256=HEX), f"{{file}}, got {HEX}: -S train.start.sha256="),
    "nothing fits": (
        lambda: read({"fc.weight": np.ones((5, 12), np.float32)}),
        "train.start.weights: {file}: no tensor fits, such as layers/0/bias: not in the file; drawn anew; layers/0/k",
    ),
    "members": (
        lambda: read(exported_tensors([PARAMS, PARAMS], 1.0), WITH_MORE_CLASSES),
        "no tensor fits, such as layers/0/bias: other shape: (2, 5) against (5,); drawn anew; layers/0/kernel: other",
    ),
    "unknown layer": (
        lambda: read(freeze=("layers/1", "layer")),
        "train.start.freeze: no layer is 'layer' or begins so; there are layers/0, layers/1, layers/2",
    ),
    "part of a layer": (lambda: read(freeze=("layers/1/kernel",)), "train.start.freeze: no layer is 'layers/1/kernel'"),
    "drawn layer": (
        lambda: read(model=WITH_MORE_CLASSES, freeze=("layers/2",)),
        "train.start.freeze: layers/2/bias: other shape: (3,) against (7,); drawn anew, which freezing would keep",
    ),
    "all layers": (lambda: read(freeze=("layers",)), "train.start.freeze: must leave a layer to train, got ['layers']"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_a_start_is_one_line(name: str, folder: Path) -> None:
    call, expected = REFUSALS[name]
    line = str(refusal(call))
    assert expected.format(root=folder, file=folder / "old.safetensors") in line


def test_the_digest_to_set_is_that_of_the_file(folder: Path) -> None:
    line = str(refusal(lambda: read(sha256=None)))
    sha256 = line.partition("-S train.start.sha256=")[2][:64]
    assert read(sha256=sha256).config.sha256 == hashlib.sha256((folder / "old.safetensors").read_bytes()).hexdigest()
